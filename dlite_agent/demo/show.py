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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlite_agent.agent.events import CallEvent, from_json
from dlite_agent.agent.terminal import ActivityBar, show_event
from dlite_agent.config import Settings
from dlite_agent.demo.task import DemoTask
from dlite_agent.errors import DLiteError, SessionError
from dlite_agent.sessions.embedded import connect
from dlite_agent.sessions.keys import KINDS, Keys
from dlite_agent.sessions.store import KindUsage, SessionStore

_SOURCES = ("forced", "lookup", "dlite")


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
    store = SessionStore(connect(settings), tenant=tenant)
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
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as worker,
        view.bar,
    ):
        try:
            _watch(worker, view, kill_after=last if is_killed else None)
        finally:
            worker.kill()  # if it has not ended by itself
        code = worker.wait()
        errors.seek(0)
        said = errors.read().strip().splitlines()[-1:]
    if view.error:
        raise DLiteError(view.error)
    if code != (-signal.SIGKILL if is_killed else 0):
        raise DLiteError(f"the agent's process ended with code {code}: {said}")
    if is_killed:
        console.print(f"\n[bold red]SIGKILL[/] to process {worker.pid} after turn {last}")


def _watch(worker: subprocess.Popen[str], view: _View, *, kill_after: int | None) -> None:
    """Show a worker's events until it ends, or kill it between two turns."""
    assert worker.stdout is not None
    for line in worker.stdout:
        fields = json.loads(line)
        view.show(fields)
        if fields["event"] == "turn_done" and fields["number"] == kill_after:
            worker.send_signal(signal.SIGKILL)
            return
    worker.wait()


class _View:
    """Prints events as they come."""

    def __init__(self, console: Console, process: int, record: _Record) -> None:
        self._console = console
        self._process = process
        self._record = record
        self._turn = 0
        self.error = ""
        self.bar = ActivityBar(console)

    def show(self, fields: dict[str, Any]) -> None:
        """Show one event of the worker."""
        kind = fields["event"]
        if kind == "prefill":
            self.bar.show_prefill(fields["done"], fields["total"])
            return
        self.bar.hide()
        if kind == "loading":
            self.bar.show(f"loading {fields['model']}")
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


def _table(calls: Sequence[tuple[int, int, CallEvent]]) -> Table:
    """Build the table of all model calls; accepted tokens per pass by source, which with the bonus make up tau."""
    table = Table(box=None, padding=(0, 1, 0, 0), title="model calls", title_justify="left")
    for name in ("proc", "turn", "prompt", "RAM", "Redis", "new", "gen", "tau", *_SOURCES, "tok/s", "KB"):
        table.add_column(name, justify="right")
    for process, turn, call in calls:
        stats = call.stats
        passes = max(1, stats["passes"])
        counts = (stats["reused_ram"], stats["reused_store"], stats["prefilled"], call.output_tokens)
        table.add_row(
            *map(str, (process, turn, call.input_tokens, *counts)),
            f"{call.tau:.2f}",
            *(f"{stats['accepted'].get(source, 0) / passes:.2f}" for source in _SOURCES),
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
