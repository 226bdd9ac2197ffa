"""What the benchmarks of recorded sessions share on the command line: the arguments, what is said, what is written."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlite_agent.arguments import positive
from dlite_agent.errors import ConfigError

if TYPE_CHECKING:
    from dlite_agent.bench.engine import Bar
    from dlite_agent.bench.exact import Mismatch


Options = TypeVar("Options", bound=Any)


def add_recorded(parser: argparse.ArgumentParser, *, limit: str, has_excerpt: bool = True) -> None:
    """Add the arguments that name models and recorded sessions.

    Args:
        parser: Where to.
        limit: What `--limit` counts.
        has_excerpt: Whether there is something to measure without `--workloads`.
    """
    default = "default: a small excerpt" if has_excerpt else "a folder with subsets.json; needed"
    parser.add_argument(
        "--model", action="append", metavar="M", help="registry name, folder or hub id; may be given again"
    )
    parser.add_argument("--workloads", type=Path, metavar="PATH", help=f"recorded sessions ({default})")
    parser.add_argument("--subset", metavar="NAME", help="a list of ids in PATH/subsets.json")
    parser.add_argument("--limit", type=positive, metavar="N", help=limit)
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="upper bound of tokens per reply")
    parser.add_argument("--seed", type=int, default=0, help="names the sampling noise (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the JSON line there too")


def with_given(options: Options, given: Mapping[str, Any], **others: Any) -> Options:
    """Return options with those that were given on the command line, and others in any case."""
    return replace(options, **{name: value for name, value in given.items() if value is not None}, **others)


def stderr_writer() -> Callable[[str], None]:
    """Return what says on stderr what is being done: stdout is the table's and the JSON line's."""
    console = Console(stderr=True)
    return lambda text: console.print(text, highlight=False, markup=False)


def figures_table(
    figures: Mapping[str, float], spreads: Mapping[str, Mapping[str, float]], bars: Mapping[str, Bar]
) -> Table:
    """Tabulate figures with the least and most of those measured several times, and what each has to be."""
    table = Table("figure", "value", "min", "max", "bar", "", box=None, padding=(0, 2, 0, 0))
    for key, value in figures.items():
        spread, bar = spreads.get(key), bars.get(key)
        ends = [f"{spread[end]:.4g}" for end in ("min", "max")] if spread else ["-", "-"]
        table.add_row(key, f"{value:.4g}", *ends, *(("-", "") if bar is None else bar.judged(value)))
    return table


def mismatch_fields(mismatch: Mismatch) -> dict[str, Any]:
    """Return a mismatch for JSON."""
    return {**asdict(mismatch), "is_near_tie": mismatch.is_near_tie}


def print_mismatches(console: Console, title: str, mismatches: Sequence[Mismatch]) -> None:
    """Tabulate texts that differ; nothing where there are none."""
    if not mismatches:
        return
    num_ties = sum(mismatch.is_near_tie for mismatch in mismatches)
    table = Table("session", "turn", "mode", "position", "expected", "got", "gap", box=None, padding=(0, 2, 0, 0))
    for m in mismatches:
        gap = "-" if m.gap is None else f"{m.gap:.2e}"
        table.add_row(escape(m.session), str(m.turn), m.mode, str(m.position), str(m.expected), str(m.got), gap)
    console.print(f"{title}: {len(mismatches)}, of which near ties: {num_ties}", highlight=False, markup=False)
    console.print(table)


def check_writable(path: Path | None) -> None:
    """Refuse a file that could not be written when all is measured.

    Raises:
        ConfigError: If it cannot be opened for writing.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); choose another file") from error


def finish(line: str, path: Path | None) -> None:
    """Print the JSON line, the last thing on stdout, and keep it."""
    print(line)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line + "\n")
