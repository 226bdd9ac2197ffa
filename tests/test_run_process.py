"""`dlite-agent run` as a process: signals, a terminal, a kill, and what the next process finds."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from dlite_agent import Settings
from dlite_agent.run import opening
from dlite_agent.sessions.embedded import EmbeddedServer
from dlite_agent.testing import write_tiny_chat_model

SCRIPTED = """
import os, signal, sys
from pathlib import Path
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from dlite_agent import RedisSaver
from dlite_agent.run.history import History
from dlite_agent.run.inputs import LineReader
from dlite_agent.run.json_view import JsonView
from dlite_agent.run.loop import Agent, Loop
from dlite_agent.run.opening import make_graph
from dlite_agent.run.stopping import Stopper
from dlite_agent.sessions.connecting import socket_client
from dlite_agent.testing import ScriptedChatModel, calling

@tool
def note(text: str) -> str:
    "Write a note, and end the process if it says so."
    with Path(sys.argv[2]).open("a") as file:
        file.write(text)
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return "noted"

script = [calling("note", text=text) for text in sys.argv[3:]] + [AIMessage("done")]
saver = RedisSaver(socket_client(sys.argv[1]))
graph = make_graph(ScriptedChatModel(script=script), [note], saver, is_asking=True)
agent = Agent(History(graph, saver, None, "thread"), [note], True, "scripted", Path(), str)
with Stopper() as stopper:
    sys.exit(Loop(agent, view=JsonView(sys.stdout), reader=LineReader(sys.stdin), stopper=stopper).run())
"""


class Script:
    """A process that is talked to in JSON lines; waits for an event kind by kind."""

    def __init__(self, *command: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])} | (environment or {}),
        )
        self.seen: list[dict[str, Any]] = []

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait_for(self, kind: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(json.loads(line))
            if self.seen[-1]["event"] == kind:
                return self.seen[-1]
        raise AssertionError(f"no {kind} among {self.seen}")

    def end(self) -> int:
        """Close its input; return its exit code."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.seen += map(json.loads, self.process.stdout)
        return self.process.wait()


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    started: list[Script] = []
    yield started
    for script in started:
        script.process.kill()
        script.process.wait()
        for stream in (script.process.stdin, script.process.stdout):
            assert stream is not None
            stream.close()


def test_an_open_question_and_a_call_that_was_cut_outlive_a_kill(
    scripts: list[Script], client: redis.Redis, server: EmbeddedServer, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"

    def start(*called: str) -> Script:
        scripts.append(Script("-c", SCRIPTED, server.state.socket, str(notes), *called))
        return scripts[-1]

    first = start("asked")
    first.send("go")
    asked = first.wait_for("approval")
    first.process.kill()
    first.process.wait()

    second = start("kill")  # the question again; what is called then ends the process in the middle
    assert second.wait_for("approval") == asked
    assert not notes.exists()
    second.send('{"approve": "always"}')
    assert second.process.wait() == -signal.SIGKILL
    assert notes.read_text() == "askedkill"

    third = start()
    assert third.wait_for("start")["is_cut"]
    third.send("and now?")
    assert third.wait_for("turn_end")["outcome"] == "done"
    assert third.end() == 0
    assert notes.read_text() == "askedkill"


@pytest.fixture
def command(tmp_path: Path, client: redis.Redis, server: EmbeddedServer) -> tuple[list[str], dict[str, str]]:
    """The command for a tiny model whose replies are long, and its environment."""
    folder = write_tiny_chat_model(tmp_path / "model", max_position_embeddings=32768)
    environment = {
        "DLITE_HOME": str(tmp_path / "home"),
        "DLITE_OFFLINE": "1",
        "DLITE_THREADS": "1",
        "REDIS_URL": f"unix://{server.state.socket}",
        "TERM": "dumb",
    }
    arguments = ["-m", "dlite_agent.cli", "run", "--model", str(folder), "--workspace", str(tmp_path)]
    return arguments, environment


def test_a_signal_stops_the_reply_and_the_thread_goes_on(
    scripts: list[Script], command: tuple[list[str], dict[str, str]]
) -> None:
    arguments, environment = command
    script = Script(*arguments, "--json", "--max-tokens", "20000", environment=environment)
    scripts.append(script)
    script.wait_for("start")
    script.send("in the prefill, before any token")
    script.wait_for("message")
    for text in ("a reply that goes on and on", "and another"):
        os.kill(script.process.pid, signal.SIGINT)
        assert script.wait_for("turn_end")["outcome"] == "stopped"
        script.send(json.dumps({"message": text}))
        script.wait_for("text")
    os.kill(script.process.pid, signal.SIGINT)
    assert script.wait_for("turn_end")["outcome"] == "stopped"
    script.send("/undo")
    assert script.wait_for("undone")["text"] == "and another"
    assert script.end() == 0
    assert script.seen[-1]["event"] == "end"


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_stream_that_is_closed_is_an_end_of_input_or_said_in_one_line(
    command: tuple[list[str], dict[str, str]], closed: str, form: tuple[str, ...]
) -> None:
    arguments, environment = command
    paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
    shell = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, *arguments, *form]
    done = subprocess.run(
        shell, env=os.environ | environment | paths, input=b"", capture_output=True, check=False, timeout=120
    )
    if closed == "<&-":
        assert done.returncode == 0
        assert b"dlite-agent run --thread default" in done.stdout.splitlines()[-1]
    else:
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(b"dlite-agent: ConfigError: standard output is closed")
    assert b"Traceback" not in done.stderr


def test_a_fault_of_our_own_is_told_to_a_script_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> opening.Options:
        raise RuntimeError("not foreseen")

    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(RuntimeError):
        opening.run_as_json(fail, settings=Settings(home=tmp_path))
    event = {"event": "error", "kind": "RuntimeError", "message": "not foreseen", "is_fatal": True}
    assert json.loads(out.getvalue()) == event


def test_a_dumb_terminal_gets_lines_and_ctrl_c_twice_leaves(command: tuple[list[str], dict[str, str]]) -> None:
    arguments, environment = command
    terminal, inner = pty.openpty()
    # A session's first process that opens a terminal gets its signals.
    shell = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(inner), sys.executable, *arguments]
    paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        [*shell, "--max-tokens", "4"], start_new_session=True, env=os.environ | environment | paths
    )
    screen = b""

    def wait_for(text: bytes, count: int = 1) -> None:
        nonlocal screen
        while screen.count(text) < count:
            assert select.select([terminal], [], [], 120)[0], screen  # a hang would say nothing
            screen += os.read(terminal, 4096)

    def press_ctrl_c() -> None:
        time.sleep(0.5)  # between its prompt and its read Python notes a signal and goes on to wait; nobody is so quick
        os.write(terminal, b"\x03")

    try:
        wait_for(b"you> ")
        os.write(terminal, b"/help\n")
        wait_for(b"you> ", 2)
        os.write(terminal, b"hello\n")
        wait_for(b"4 generated")
        wait_for(b"you> ", 3)
        press_ctrl_c()
        wait_for(b"you> ", 4)
        press_ctrl_c()
        wait_for(b"resume with: ")
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        os.close(inner)
        os.close(terminal)
    assert b"/undo" in screen
    assert b"Ctrl-C again" in screen
    assert b"\x1b" not in screen


def test_a_thread_is_open_in_one_run_at_a_time(
    scripts: list[Script], command: tuple[list[str], dict[str, str]]
) -> None:
    arguments, environment = command
    arguments = [*arguments, "--json", "--max-tokens", "4", "--thread"]
    scripts += [Script(*arguments, "trip", environment=environment)]
    scripts[0].wait_for("start")
    scripts += [Script(*arguments, "trip", environment=environment)]
    refused = scripts[1].wait_for("error")
    assert (refused["kind"], refused["is_fatal"]) == ("ThreadInUseError", True)
    assert scripts[1].end() == 1
    scripts[0].send("hello")
    assert scripts[0].wait_for("turn_end")["outcome"] == "done"
    scripts[0].send("/fork side")
    scripts[0].wait_for("forked")
    scripts += [Script(*arguments, "trip", environment=environment)]  # free again
    assert scripts[2].wait_for("start")["num_turns"] == 1
    scripts += [Script(*arguments, "side", environment=environment)]
    assert scripts[3].wait_for("error")["kind"] == "ThreadInUseError"
