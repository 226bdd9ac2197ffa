"""The demo as a person sees it: two processes, a kill in between, a table, and what was stored."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dlite_agent.agent.events import CallEvent, from_json
from dlite_agent.agent.terminal import show_event
from dlite_agent.config import Settings
from dlite_agent.demo.task import DemoTask
from dlite_agent.errors import DLiteError, SessionError
from dlite_agent.sessions.embedded import connect
from dlite_agent.sessions.keys import KINDS, Keys
from dlite_agent.sessions.store import KindUsage, SessionStore

_LONG_PREFILL = 64


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo runs with.

    Attributes:
        model: The target.
        drafter: How its tokens are drafted.
        quantize: "int8" or None.
        wording: Which wording of the task.
        is_killed: Whether the first process is killed; without, one process does it all.
        max_tokens: Upper bound of tokens per reply.
    """

    model: str
    drafter: str
    quantize: str | None
    wording: int
    is_killed: bool = True
    max_tokens: int = 300


@dataclass(slots=True)
class _Record:
    """What the run showed."""

    calls: list[tuple[int, int, CallEvent]] = field(default_factory=list)  # process, turn, figures
    end: dict[str, Any] = field(default_factory=dict)


def run_demo(options: DemoOptions, *, settings: Settings, console: Console) -> bool:
    """Run the demo; returns whether the task was done and resumed without prefilling again.

    Raises:
        DLiteError: If a process failed, with what it said.
    """
    task = DemoTask.load(options.wording)
    tenant = f"demo-{uuid.uuid4().hex[:12]}"
    store = SessionStore(connect(settings, keep=True), tenant=tenant)
    folder = Path(tempfile.mkdtemp(prefix="dlite demo "))
    started = time.monotonic()
    try:
        task.prepare(folder)
        record = _run_processes(task, options, tenant, folder, console)
        checks = task.check(folder, {"todos": record.end["todos"], "messages": [_Answer(record.end["answer"])]})
        usage = store.usage()
    finally:
        shutil.rmtree(folder)
        _remove_tenant(store, tenant)
    console.print(_table(record.calls))
    resumed = _resumed(record.calls)
    _print_storage(usage, console)
    if resumed is not None:
        console.print(
            f"resumed in process 2: {resumed.stats['reused_store']} tokens came from Redis, "
            f"{resumed.stats['prefilled']} new ones were prefilled"
        )
    for check in checks:
        console.print(f"{'[green]done[/]' if check.is_met else '[red]not done[/]'}  {escape(check.what)}")
    console.print(f"{time.monotonic() - started:.0f} s")
    return all(check.is_met for check in checks)


@dataclass(frozen=True, slots=True)
class _Answer:
    content: str


def _run_processes(task: DemoTask, options: DemoOptions, tenant: str, folder: Path, console: Console) -> _Record:
    """Run all turns, in one process or in two with a kill between them."""
    record = _Record()
    turns = list(enumerate(task.turns, start=1))
    cut = task.kill_after_turn if options.is_killed else len(turns)
    job = {
        "model": options.model,
        "drafter": options.drafter,
        "quantize": options.quantize,
        "max_tokens": options.max_tokens,
        "thread_id": f"demo-{uuid.uuid4().hex[:8]}",
        "tenant": tenant,
        "workspace": str(folder),
    }
    for number, part in enumerate(part for part in (turns[:cut], turns[cut:]) if part):
        is_first = number == 0 and options.is_killed
        console.rule(f"process {number + 1}")
        _follow({**job, "turns": part}, process=number + 1, record=record, console=console, is_killed=is_first)
    return record


def _follow(job: dict[str, Any], *, process: int, record: _Record, console: Console, is_killed: bool) -> None:
    """Start a worker and show its events; kill it after its last turn if it is to be killed."""
    last = job["turns"][-1][0]
    view = _View(console, process, record)
    job = {**job, "linger": is_killed}
    command = [sys.executable, "-m", "dlite_agent.demo.worker", json.dumps(job)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker, view.shown():
        assert worker.stdout is not None
        assert worker.stderr is not None
        for line in worker.stdout:
            event = json.loads(line)
            view.show(event)
            if is_killed and event["event"] == "turn_done" and event["number"] == last:
                worker.send_signal(signal.SIGKILL)
                console.print(f"\n[bold red]SIGKILL[/] to process {worker.pid} after turn {last}")
                break
        worker.stdout.close()
        errors = worker.stderr.read()
        code = worker.wait()
    if view.error:
        raise DLiteError(view.error)
    if code != (-signal.SIGKILL if is_killed else 0):
        raise DLiteError(f"the agent's process ended with code {code}: {errors.strip().splitlines()[-1:]}")


class _View:
    """Prints events as they come."""

    def __init__(self, console: Console, process: int, record: _Record) -> None:
        self._console = console
        self._process = process
        self._record = record
        self._turn = 0
        self.error = ""
        self._progress = Progress(
            TextColumn("  {task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True
        )
        self._task: Any = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the progress line while inside."""
        with self._progress:
            yield

    def show(self, fields: dict[str, Any]) -> None:
        """Show one event of the worker."""
        kind = fields["event"]
        if kind == "prefill":
            self._show_prefill(fields["done"], fields["total"])
            return
        self._no_bar()
        if kind == "loading":
            self._bar(f"loading {fields['model']}", None, None)
        elif kind == "turn":
            self._turn = fields["number"]
            self._console.print(f"\n[bold cyan]{self._turn}. you:[/] {escape(fields['text'])}")
        elif kind == "end":
            self._record.end = fields
        elif kind == "error":
            self.error = f"{fields['kind']}: {fields['message']}"
        elif (event := from_json(fields)) is not None:
            if isinstance(event, CallEvent):
                self._record.calls.append((self._process, self._turn, event))
            show_event(event, self._console)

    def _show_prefill(self, done: int, total: int) -> None:
        if total >= _LONG_PREFILL and done < total:
            self._bar(f"prefill of {total} tokens", done, total)
        else:
            self._no_bar()

    def _bar(self, description: str, done: int | None, total: int | None) -> None:
        if self._task is None:
            self._task = self._progress.add_task(description, total=total)
        self._progress.update(self._task, description=description, completed=done or 0, total=total)

    def _no_bar(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


def _table(calls: Sequence[tuple[int, int, CallEvent]]) -> Table:
    """Build the table of all model calls."""
    table = Table(title="model calls", title_justify="left")
    for name in ("process", "turn", "prompt", "RAM", "Redis", "prefilled", "generated", "tau"):
        table.add_column(name, justify="right")
    for name in ("forced", "drafted", "bonus", "tokens/s", "stored KB"):
        table.add_column(name, justify="right")
    for process, turn, call in calls:
        stats, accepted = call.stats, call.stats["accepted"]
        passes = max(1, stats["passes"])
        forced = accepted.get("forced", 0)
        drafted = sum(accepted.values()) - forced
        counts = (stats["reused_ram"], stats["reused_store"], stats["prefilled"], call.output_tokens)
        table.add_row(
            *map(str, (process, turn, call.input_tokens, *counts)),
            f"{call.tau:.2f}",
            f"{forced / passes:.2f}",
            " ".join(f"{name} {n / passes:.2f}" for name, n in accepted.items() if name != "forced") or f"{drafted}",
            f"{(call.output_tokens - 1 - sum(accepted.values())) / passes:.2f}",
            f"{call.tokens_per_second:.1f}",
            f"{stats['stored_bytes'] / 1024:.0f}",
        )
    return table


def _resumed(calls: Sequence[tuple[int, int, CallEvent]]) -> CallEvent | None:
    return next((call for process, _, call in calls if process == 2), None)


def _print_storage(usage: dict[str, KindUsage], console: Console) -> None:
    for kind, size in sorted(usage.items()):
        console.print(f"stored: {size.num_keys:4d} {kind} keys, {size.num_bytes / 2**20:.2f} MiB")
    # Every kind of key the store can write is listed above; there is none for a drafter.
    drafter = sum(size.num_bytes for kind, size in usage.items() if kind not in KINDS)
    console.print(f"drafter state stored: {drafter} bytes")


def _remove_tenant(store: SessionStore, tenant: str) -> None:
    """Remove what the demo stored; it belongs to no session a person would resume."""
    try:
        for key in store.client.scan_iter(match=Keys(tenant).everything(), count=1000):
            store.client.unlink(key)
    except (SessionError, OSError):
        return
