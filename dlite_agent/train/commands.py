"""`dlite-agent corpus` and `dlite-agent train`: arguments in, work done, a few lines out."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dlite_agent.arguments import positive
from dlite_agent.config import Settings
from dlite_agent.train.options import CorpusOptions, RunOptions

if TYPE_CHECKING:
    from dlite_agent.train.corpus import Author, Progress

_REPORT_EVERY_S = 30.0

Subparsers = argparse._SubParsersAction


def add_training(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the `corpus` and `train` commands to a parser."""
    _add_corpus(commands)
    _add_train(commands)


def _add_corpus(commands: Subparsers[argparse.ArgumentParser]) -> None:
    corpus = commands.add_parser("corpus", help="let a target answer recorded prompts, to train a drafter on it")
    defaults = CorpusOptions()
    corpus.add_argument("--target", required=True, metavar="MODEL", help="registry name, folder or hub id")
    corpus.add_argument(
        "--workloads", required=True, type=Path, metavar="FOLDER", help="agent/, general/, subsets.json"
    )
    corpus.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="a new corpus, or one to go on with")
    corpus.add_argument("--held-out", action="store_true", help="answer the held-out sessions instead, for measuring")
    corpus.add_argument(
        "--contexts", action="store_true", help="keep the rows of whole prompts too, for drafters with a history"
    )
    corpus.add_argument("--minutes", type=float, help="stop after so long; run again to go on")
    corpus.add_argument(
        "--samples",
        type=int,
        default=defaults.num_samples,
        help="sampled answers to each prompt (default: %(default)s)",
    )
    corpus.add_argument(
        "--temperature", type=float, default=defaults.temperature, help="of the samples (default: %(default)s)"
    )
    corpus.add_argument(
        "--max-tokens", type=positive, default=defaults.max_tokens, help="longest answer (default: %(default)s)"
    )
    corpus.add_argument(
        "--max-prompt", type=positive, default=defaults.max_prompt, help="longest prompt (default: %(default)s)"
    )
    corpus.add_argument("--concurrency", type=positive, default=16, help="sessions at once (default: %(default)s)")
    corpus.add_argument("--features", type=positive, default=5, help="feature layers S (default: %(default)s)")
    corpus.add_argument("--shard-mb", type=float, default=32.0, help="size of a shard in MB (default: %(default)s)")
    corpus.add_argument("--seed", type=int, default=defaults.seed, help="of samples and order (default: %(default)s)")
    corpus.add_argument("--quantize", choices=("auto", "int8", "none"), default="auto", help="as the model will be run")
    corpus.add_argument("--no-lookup", action="store_true", help="decode plainly; the tokens are the same")
    corpus.set_defaults(command=_corpus)


def _corpus(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    from dlite_agent.engine.draft_length import AdaptiveLength, PassCost
    from dlite_agent.train.corpus import CorpusBuilder, about, corpus_drafter
    from dlite_agent.train.recordings import training_sessions
    from dlite_agent.train.shards import CorpusWriter

    options = _corpus_options(arguments)
    sessions = training_sessions(arguments.workloads, is_held_out=options.is_held_out, seed=options.seed)
    author = _author(arguments, settings)
    shard_bytes = round(arguments.shard_mb * 2**20)
    writer = CorpusWriter(arguments.out, about(author, options, model=arguments.target), shard_bytes=shard_bytes)
    cost = PassCost.of(author.target, folder=settings.home / "calibration")
    builder = CorpusBuilder(
        author,
        options,
        writer,
        planner=AdaptiveLength(cost),
        drafter=corpus_drafter(is_lookup=not arguments.no_lookup),
        concurrency=arguments.concurrency,
    )
    report = _Reporter(console, num_sessions=len(sessions))
    budget = float("inf") if arguments.minutes is None else 60 * arguments.minutes
    with terminable() as is_terminated:
        builder.build(sessions, should_stop=lambda done: report(done) or is_terminated() or done.seconds >= budget)
    report.say(builder.progress)
    counts = writer.close(last_run=asdict(builder.progress))["counts"]
    console.print(
        f"{arguments.out}: {counts['num_answers']} answers, {counts['num_tokens']} tokens of "
        f"{counts['num_sessions']} sessions in {counts['num_shards']} shards",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _corpus_options(arguments: argparse.Namespace) -> CorpusOptions:
    return CorpusOptions(
        num_samples=arguments.samples,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        max_prompt=arguments.max_prompt,
        seed=arguments.seed,
        is_held_out=arguments.held_out,
        keeps_contexts=arguments.contexts,
    )


def _add_train(commands: Subparsers[argparse.ArgumentParser]) -> None:
    train = commands.add_parser("train", help="train a drafter on a corpus")
    defaults = RunOptions("", Path(), Path())
    train.add_argument("--target", required=True, metavar="MODEL", help="the model that wrote the corpus")
    train.add_argument("--corpus", required=True, type=Path, metavar="FOLDER", help="made by `dlite-agent corpus`")
    train.add_argument("--held-out", type=Path, metavar="FOLDER", help="made by `dlite-agent corpus --held-out`")
    train.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where the drafter goes")
    train.add_argument("--teacher", type=Path, metavar="FOLDER", help="made by `train --config kind=teacher`")
    train.add_argument("--minutes", type=float, help="train for so long")
    train.add_argument("--epochs", type=float, help="or for so many passes over the corpus (default: 3)")
    train.add_argument("--config", action="append", default=[], metavar="NAME=VALUE", help="see train/config.py")
    train.add_argument(
        "--report-every", type=positive, default=defaults.report_every, metavar="STEPS", help="lines of the log"
    )
    train.add_argument(
        "--checkpoint-seconds",
        type=float,
        default=defaults.checkpoint_seconds,
        metavar="S",
        help="between two checkpoints",
    )
    train.add_argument(
        "--max-held-out",
        type=positive,
        default=defaults.max_held_out,
        metavar="ANSWERS",
        help="to replay for each line",
    )
    train.add_argument("--device", default=defaults.device, help="cpu or cuda (default: %(default)s)")
    train.add_argument("--resume", action="store_true", help="go on from the checkpoint in the folder")
    train.set_defaults(command=_train)


def _train(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    import torch

    from dlite_agent.train.ranks import join_ranks
    from dlite_agent.train.setup import prepare

    torch.set_num_threads(settings.threads)
    minutes, epochs = arguments.minutes, arguments.epochs
    options = RunOptions(
        target=arguments.target,
        corpus=arguments.corpus,
        held_out=arguments.held_out,
        out=arguments.out,
        teacher=arguments.teacher,
        minutes=minutes,
        epochs=3.0 if minutes is None and epochs is None else epochs,
        settings=tuple(arguments.config),
        report_every=arguments.report_every,
        checkpoint_seconds=arguments.checkpoint_seconds,
        max_held_out=arguments.max_held_out,
        device=arguments.device,
        is_resumed=arguments.resume,
    )
    with join_ranks(arguments.device) as ranks:
        trainer = prepare(options, settings, ranks)
        with terminable() as is_terminated:
            trainer.run(
                should_stop=is_terminated, say=lambda line: console.print(line, highlight=False, soft_wrap=True)
            )
    state = "done" if trainer.progress >= 1 else "stopped; --resume goes on"
    if ranks.is_first:
        console.print(f"{arguments.out}: step {trainer.step}, {state}", highlight=False, soft_wrap=True)
    if ranks.count > 1:  # gloo's threads may still hold tensors; to free them in a closing interpreter is to abort
        sys.stdout.flush()
        os._exit(0)
    return 0


def _author(arguments: argparse.Namespace, settings: Settings) -> Author:
    from dlite_agent.drafters.pivot import pivot_layer_ids
    from dlite_agent.runtime import shared_runtime
    from dlite_agent.train.corpus import Author

    quantize: Any = None if arguments.quantize == "none" else arguments.quantize
    runtime = shared_runtime(arguments.target, drafter="null", quantize=quantize, store=None, settings=settings)
    target = runtime.target
    target.tap(pivot_layer_ids(target.num_layers, arguments.features))
    return Author(target, runtime.encoder, runtime.render, runtime.end_ids)


@contextmanager
def terminable() -> Iterator[Callable[[], bool]]:
    """Turn SIGTERM and SIGINT into a question that the work asks itself; a second one ends the process as usual."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Reporter:
    """Prints a line now and then."""

    def __init__(self, console: Console, *, num_sessions: int) -> None:
        self._console = console
        self._num_sessions = num_sessions
        self._last = time.monotonic()

    def __call__(self, progress: Progress) -> bool:
        """Print if it is time; False, so that it can stand in a condition."""
        if time.monotonic() - self._last >= _REPORT_EVERY_S:
            self._last = time.monotonic()
            self.say(progress)
        return False

    def say(self, progress: Progress) -> None:
        """Print a line."""
        rate = progress.num_tokens / progress.seconds if progress.seconds else 0.0
        numbers = f"of {self._num_sessions} sessions: " + ", ".join(
            f"{f.name.removeprefix('num_')} {getattr(progress, f.name):.0f}" for f in fields(progress)
        )
        self._console.print(f"{numbers}, {rate:.1f} tokens/s", highlight=False, soft_wrap=True)
