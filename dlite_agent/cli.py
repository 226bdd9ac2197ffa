"""The command line: `dlite-agent ...`. Errors of ours are one line and a non-zero exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlite_agent import __version__
from dlite_agent.arguments import positive
from dlite_agent.bench.commands import add_bench
from dlite_agent.config import Settings
from dlite_agent.errors import DLiteError
from dlite_agent.session_commands import add_sessions
from dlite_agent.train.commands import add_training

DEFAULT_MODEL = "qwen2.5-coder-1.5b"
"""The smallest registered model that completes the demo's task in all of its wordings."""

Command = Callable[[argparse.Namespace, Settings, Console], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    console = Console()
    try:
        arguments = _parser().parse_args(argv)
        command: Command = arguments.command
        return command(arguments, Settings(), console)
    except DLiteError as error:
        sys.stderr.write(f"dlite-agent: {type(error).__name__}: {' '.join(str(error).split())}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("dlite-agent: interrupted\n")
        return 130
    except BrokenPipeError:
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dlite-agent",
        description="LangGraph agents on a local model, with speculative decoding and sessions that survive.",
    )
    parser.add_argument("--version", action="version", version=f"dlite-agent {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    pull = commands.add_parser("pull", help="fetch, check and convert a model")
    pull.add_argument("model", help="a registry name (see `models`) or a hub id")
    pull.add_argument("--verify", action="store_true", help="check every file's digest again")
    pull.set_defaults(command=_pull)

    commands.add_parser("models", help="list registered and installed models").set_defaults(command=_models)
    commands.add_parser("doctor", help="say what is installed and what is missing").set_defaults(command=_doctor)
    _add_run(commands)
    _add_demo(commands)
    _add_drafter(commands)
    add_sessions(commands)
    add_bench(commands)
    add_training(commands)
    return parser


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="registry name, folder or hub id (default: %(default)s)")
    parser.add_argument("--drafter", default="auto", help="auto, lookup, null or the folder of a DLite checkpoint")
    parser.add_argument(
        "--quantize",
        choices=("auto", "int8", "none"),
        default="auto",
        help="int8 weights (default: as the model needs)",
    )


def _quantize(arguments: argparse.Namespace) -> Literal["auto", "int8"] | None:
    return None if arguments.quantize == "none" else arguments.quantize


def _pull(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    from dlite_agent import models

    with models.progress_bars() as progress:
        if arguments.verify:
            folder = models.verify(arguments.model, settings=settings, progress=progress)
        else:
            folder = models.resolve(arguments.model, settings=settings, progress=progress)
    console.print(f"{escape(arguments.model)} is in {escape(str(folder))}", soft_wrap=True)
    return 0


def _models(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    from dlite_agent.models import REGISTRY, installed

    there = {model.name: model for model in installed(settings=settings)}
    table = Table("name", "what", "licence", "state", box=None, padding=(0, 2, 0, 0))
    for name, spec in REGISTRY.items():
        model = there.get(name)
        state = f"`dlite-agent pull {name}`"
        if model is not None:
            state = model.problem or f"installed, {model.num_bytes / 2**30:.1f} GiB"
        table.add_row(name + (" (default)" if name == DEFAULT_MODEL else ""), spec.title, spec.licence, state)
    console.print(table)
    console.print("any local folder or hub id of a chat model of a known family works as well (see the README)")
    return 0


def _doctor(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    from dlite_agent.doctor import examine

    findings = examine(settings)
    for finding in findings:
        mark = "[green]ok[/]" if finding.is_fine else "[red]--[/]"
        console.print(f"{mark}  {escape(finding.what)}: {escape(finding.state)}", highlight=False, soft_wrap=True)
    return 0 if all(finding.is_fine for finding in findings if finding.is_needed) else 1


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser("run", help="talk to an agent that works in a folder")
    _add_target(run)
    run.add_argument("--thread", default="default", help="conversation to start or resume (default: %(default)s)")
    run.add_argument("--workspace", type=Path, default=Path(), help="folder the agent may use (default: this one)")
    run.add_argument("--max-tokens", type=positive, default=1024, help="upper bound of tokens per reply")
    run.add_argument("--approve", action="store_true", help="decide on each tool call before it runs")
    run.add_argument("--json", action="store_true", help="talk with a script: an event per line (docs/RUN.md)")
    run.set_defaults(command=_run)


def _run(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    from dlite_agent.run.opening import Options, run_as_json, run_in_terminal

    def options() -> Options:
        return Options(
            model=arguments.model,
            drafter=arguments.drafter,
            quantize=_quantize(arguments),
            thread_id=arguments.thread,
            workspace=arguments.workspace,
            max_tokens=arguments.max_tokens,
            is_asking=arguments.approve,
        )

    if arguments.json:
        return run_as_json(options, settings=settings)
    return run_in_terminal(options(), settings=settings, console=console)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="see an agent work, die and resume")
    _add_target(demo)
    demo.add_argument("--wording", type=int, default=1, help="which of the five wordings of the task (default: 1)")
    demo.add_argument("--no-kill", action="store_true", help="let one process do it all")
    demo.add_argument("--replay", type=Path, metavar="PATH", help="replay recorded sessions instead")
    demo.add_argument("--subset", metavar="NAME", help="a list of ids in PATH/subsets.json")
    demo.add_argument("--limit", type=positive, metavar="N", help="the first N sessions only")
    demo.add_argument("--session", action="append", default=[], metavar="ID", help="which ones (default: all)")
    demo.add_argument("--max-tokens", type=positive, default=None, help="upper bound of tokens per reply")
    demo.set_defaults(command=_demo)


def _demo(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    if arguments.replay is not None:
        from dlite_agent.demo.replaying import replay_file

        return replay_file(
            arguments.replay,
            ids=arguments.session,
            subset=arguments.subset,
            limit=arguments.limit,
            model=arguments.model,
            drafter=arguments.drafter,
            quantize=_quantize(arguments),
            max_tokens=16 if arguments.max_tokens is None else arguments.max_tokens,
            settings=settings,
            console=console,
        )
    from dlite_agent.demo.show import DemoOptions, run_demo
    from dlite_agent.models import progress_bars, resolve

    with progress_bars() as progress:
        resolve(arguments.model, settings=settings, progress=progress)
    options = DemoOptions(
        model=arguments.model,
        drafter=arguments.drafter,
        quantize=_quantize(arguments),
        wording=arguments.wording,
        is_killed=not arguments.no_kill,
        max_tokens=300 if arguments.max_tokens is None else arguments.max_tokens,
    )
    return 0 if run_demo(options, settings=settings, console=console) else 1


def _add_drafter(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    drafter = commands.add_parser("drafter", help="work with drafter checkpoints")
    actions = drafter.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="compare a checkpoint with the outputs recorded beside it")
    check.add_argument("folder", type=Path, help="holds config.json, model.safetensors and io.safetensors")
    check.set_defaults(command=_check_drafter)


def _check_drafter(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    from dlite_agent.drafters.golden import TOLERANCE, check

    report = check(arguments.folder)
    for name in ("hidden_error", "forced_logits_error", "greedy_logits_error"):
        console.print(f"{name:20} {getattr(report, name):.2e}  (at most {TOLERANCE:.0e})", highlight=False)
    console.print(f"{'drafts':20} {'equal' if report.drafts_equal else 'different'}", highlight=False)
    console.print("passed" if report.passed else "failed")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
