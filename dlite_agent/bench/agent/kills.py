"""Agents that are killed at a random moment and resumed elsewhere: no committed tool runs twice, the plan holds.

The worker is an agent of `create_dlite_agent` over a tiny random model whose sessions are in Redis, as is the
conversation; what it has to say is a script, so that it works on a plan with a tool that notes every run in a file.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import redis
import torch
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from dlite_agent import ChatDLite, RedisSaver, SessionStore, Settings, create_dlite_agent
from dlite_agent.agent.turns import is_turn_over
from dlite_agent.bench.agent.replay import ScriptedReplies
from dlite_agent.bench.journal import Journal
from dlite_agent.bench.sessions.servers import ScratchServer
from dlite_agent.prompting.messages import METADATA_KEY
from dlite_agent.runtime import close_all
from dlite_agent.sessions.embedded import find_server
from dlite_agent.testing import write_tiny_chat_model

_PATIENCE_S = 300.0
_TENANT = "kills"
_MAX_TRIES = 4
_REPLY_TOKENS = 8
_TOOL_S = 0.05
_STEPS = ("gather", "sort", "report")


@dataclass(frozen=True, slots=True)
class Errand:
    """What a worker has to do, or to go on with.

    Attributes:
        folder: Of the model; the home is beside it.
        socket: Of the server.
        thread: The conversation.
        journal: The file in which the tool notes its runs.
    """

    folder: Path
    socket: str
    thread: str
    journal: Path


@dataclass(frozen=True, slots=True)
class KillReport:
    """One run.

    Attributes:
        seed: Its name.
        delay_ms: From the worker's readiness to its end.
        is_killed: Whether the kill came before the work was done.
        committed: Tool results that were committed at that moment.
        reused: Prompt tokens that the second process had from Redis.
        faults: What went wrong.
    """

    seed: int
    delay_ms: float
    is_killed: bool
    committed: int
    reused: int
    faults: tuple[str, ...] = ()

    @property
    def is_resumed(self) -> bool:
        """Whether a killed session was resumed, and nothing was lost or done twice."""
        return self.is_killed and not self.faults

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> KillReport:
        """Read a report of a journal."""
        return cls(**{**fields, "faults": tuple(fields["faults"])})


@cache
def script() -> tuple[tuple[str, tuple[AIMessage, ...]], ...]:
    """Return what the user says and how the agent answers, turn by turn."""
    turns = []
    for number, step in enumerate(_STEPS):
        todos = [
            {"content": each, "status": ("completed", "in_progress", "pending")[(i >= number) + (i > number)]}
            for i, each in enumerate(_STEPS)
        ]
        replies = [
            _calling("write_todos", f"plan {number}", todos=todos),
            _calling("append", f"a {number}", entry=2 * number),
            _calling("append", f"b {number}", entry=2 * number + 1),
            AIMessage(f"Done: {step}."),
        ]
        turns.append((f"Please {step}.", tuple(replies)))
    return tuple(turns)


def _calling(name: str, id: str, **args: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": id}])


def run_kills(num_runs: int, *, seed: int, journal: Journal, say: Callable[[str], None]) -> list[KillReport]:
    """Do the runs that the journal does not hold; returns the reports of all."""
    finished = {report.seed: report for report in map(KillReport.from_dict, journal.reports())}
    wanted = range(seed, seed + num_runs)
    if any(each not in finished for each in wanted):
        with tempfile.TemporaryDirectory(prefix="dlite-bench-") as name, ScratchServer(find_server()) as server:
            folder = write_tiny_chat_model(Path(name) / "model", max_position_embeddings=16_384, num_hidden_layers=2)
            lab = _Lab(folder, server.socket)
            for each in wanted:
                if each not in finished:
                    report = finished[each] = lab.run(each)
                    journal.add(asdict(report))
                    when = f"killed after {report.delay_ms:.0f} ms, {report.committed} results committed"
                    say(f"run {each}: {when}: {'; '.join(report.faults) or 'resumed'}")
    return [finished[each] for each in wanted]


class _Lab:
    """A server, a model, and what a run without a kill gives."""

    def __init__(self, folder: Path, socket: str) -> None:
        self._folder = folder
        self._client = redis.Redis(unix_socket_path=socket)
        self._socket = socket
        whole = employ(self._errand("whole"))
        self._seconds = whole.seconds
        self._expected = self._state("whole").story

    def run(self, seed: int) -> KillReport:
        """Kill a worker, and let another go on; where the kill came too late, once more and sooner."""
        share = random.Random(seed).uniform(0.0, 1.0)
        report = KillReport(seed, 0.0, False, 0, 0)
        for number in range(_MAX_TRIES):
            report = self._try(seed, f"{seed} {number}", share * self._seconds / 2**number)
            if report.is_killed:
                break
        return report

    def _try(self, seed: int, thread: str, delay_s: float) -> KillReport:
        errand = self._errand(thread)
        if employ(errand, kill_after_s=delay_s).is_done:
            return KillReport(seed, 1000 * delay_s, False, 0, 0, ("the work was done before the kill",))
        state, before = self._state(thread), _runs(errand.journal)
        faults = [] if state.todos == state.last_plan else [f"at the kill the plan is {state.todos}"]
        second = employ(errand)
        after = _runs(errand.journal)
        faults += [] if second.is_done else ["the second process did not end the work"]
        faults += [f"run {each} was committed and repeated" for each in state.entries if after[each] != before[each]]
        faults += [f"run {each} is missing" for each in range(2 * len(_STEPS)) if not after[each]]
        if self._state(thread).story != self._expected:
            faults.append("the conversation or the plan is not that of a run without a kill")
        return KillReport(seed, 1000 * delay_s, True, len(state.entries), second.reused, tuple(faults))

    def _errand(self, thread: str) -> Errand:
        return Errand(self._folder, self._socket, thread, self._folder.parent / f"runs {thread}")

    def _state(self, thread: str) -> _State:
        return _State.read(RedisSaver(self._client, tenant=_TENANT), thread)


@dataclass(frozen=True, slots=True)
class _State:
    """What is committed of a conversation: its checkpoint, and the results that are stored beside it."""

    messages: list[BaseMessage]
    todos: list[tuple[str, str]]

    @classmethod
    def read(cls, saver: RedisSaver, thread: str) -> _State:
        messages: list[BaseMessage] = []
        found = saver.get_tuple({"configurable": {"thread_id": thread}})
        if found is None:
            return cls(messages, [])
        values = found.checkpoint["channel_values"]
        messages += values.get("messages") or ()
        todos = values.get("todos")
        for _, channel, value in found.pending_writes or ():
            if channel == "messages":
                messages += value if isinstance(value, list) else [value]
            elif channel == "todos":
                todos = value
        return cls(messages, _plan(todos or ()))

    @property
    def entries(self) -> list[int]:
        """The runs of the tool whose results are committed."""
        results = [m for m in self.messages if isinstance(m, ToolMessage) and m.name == "append"]
        return sorted(int(message.text.split()[-1]) for message in results)

    @property
    def last_plan(self) -> list[tuple[str, str]]:
        """The plan of the last call that changed it and has its result."""
        done = {message.tool_call_id for message in self.messages if isinstance(message, ToolMessage)}
        calls = [call for message in self.messages if isinstance(message, AIMessage) for call in message.tool_calls]
        plans = [call["args"]["todos"] for call in calls if call["name"] == "write_todos" and call["id"] in done]
        return _plan(plans[-1]) if plans else []

    @property
    def story(self) -> Any:
        """All that was said and done, without ids and figures that differ from run to run."""
        said = [
            (m.type, m.text, [call["args"] for call in m.tool_calls] if isinstance(m, AIMessage) else [])
            for m in self.messages
        ]
        return said, self.todos


def _plan(todos: Iterable[Mapping[str, str]]) -> list[tuple[str, str]]:
    return [(step["content"], step["status"]) for step in todos]


def _runs(journal: Path) -> Counter[int]:
    """Count the runs of each entry; the last line may be cut."""
    text = journal.read_text() if journal.exists() else ""
    return Counter(int(line) for line in text.split("\n")[:-1])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a worker.

    Attributes:
        is_done: Whether it did all of its work.
        seconds: From its readiness to its end.
        reused: Prompt tokens that it had from Redis.
    """

    is_done: bool
    seconds: float
    reused: int = 0


def employ(errand: Errand, *, kill_after_s: float | None = None) -> Outcome:
    """Have a new process do the errand or go on with it; send it SIGKILL after so many seconds of work."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(errand, theirs), daemon=True)
    process.start()
    theirs.close()
    reused: int | None = None
    start = time.perf_counter()
    try:
        if ours.poll(_PATIENCE_S) and ours.recv() == "ready":
            start = time.perf_counter()
            if ours.poll(_PATIENCE_S if kill_after_s is None else kill_after_s):
                reused = ours.recv()
    except EOFError:  # it failed by itself, and has said so on stderr
        pass
    seconds = time.perf_counter() - start
    if reused is None:
        process.kill()
    process.join()
    return Outcome(reused is not None, seconds, reused or 0)


def _work(errand: Errand, pipe: Connection) -> None:
    torch.set_num_threads(1)
    client = redis.Redis(unix_socket_path=errand.socket)
    settings = Settings(home=errand.folder.parent / "home", threads=1, offline=True)
    store = SessionStore(client, tenant=_TENANT)
    chat = ChatDLite(model=str(errand.folder), session_store=store, max_tokens=_REPLY_TOKENS, settings=settings)
    chat.warm_up()
    saver = RedisSaver(client, tenant=_TENANT)
    config: Any = {"configurable": {"thread_id": errand.thread}}
    pipe.send("ready")
    values = _graph(chat, saver, errand, 0).get_state(config)
    messages = values.values.get("messages") or []
    num_before, turn = len(messages), sum(isinstance(message, HumanMessage) for message in messages)
    is_over = is_turn_over(messages)  # `next` does not tell: it leaves out tasks that have written
    if values.next or not is_over:
        at = turn if is_over else turn - 1  # its input may not be among the messages yet
        _graph(chat, saver, errand, min(at, len(script()) - 1)).invoke(None, config)
        messages = _graph(chat, saver, errand, 0).get_state(config).values["messages"]
        turn = sum(isinstance(message, HumanMessage) for message in messages)
    for number in range(turn, len(script())):
        said = {"messages": [HumanMessage(script()[number][0])]}
        messages = _graph(chat, saver, errand, number).invoke(said, config)["messages"]
    new = [message for message in messages[num_before:] if isinstance(message, AIMessage)]
    pipe.send(sum(message.response_metadata[METADATA_KEY]["stats"]["reused_store"] for message in new))
    close_all()


def _graph(chat: ChatDLite, saver: RedisSaver, errand: Errand, turn: int) -> Any:
    """Make the agent that says what the script has for a turn."""

    def append(entry: int) -> str:
        """Append an entry to the journal."""
        with errand.journal.open("a") as file:
            file.write(f"{entry}\n")
            file.flush()
            os.fsync(file.fileno())
        time.sleep(_TOOL_S)
        return f"appended {entry}"

    replies = ScriptedReplies(script()[turn][1])
    return create_dlite_agent(chat, [append], middleware=[replies], checkpointer=saver)
