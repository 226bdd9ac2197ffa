"""Programs of the model: what comes back, and how callers, threads and event loops fare meanwhile."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool

from dlite_agent.errors import ConfigError
from dlite_agent.tools import Limits, process, python_tool
from dlite_agent.tools import python as python_module
from dlite_agent.tools.process import require_confinement, run_confined

try:
    require_confinement()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def as_call(code: str) -> dict[str, Any]:
    return {"type": "tool_call", "id": "1", "name": "run_python", "args": {"code": code}}


def run(tool: BaseTool, code: str) -> ToolMessage:
    message = tool.invoke(as_call(code))
    assert isinstance(message, ToolMessage)
    return message


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print('a')\nprint('b')", "a\nb"),
        ("2 + 3", "5"),
        ("x = 2\nx * 'ab'", "'abab'"),
        ("x = 2", "(no output; use print to see a value)"),
        ("", "(no output; use print to see a value)"),
        ("None", "(no output; use print to see a value)"),
        ("from __future__ import annotations\n1", "1"),
        ("import sys\nprint('a', file=sys.stderr)", "a"),
        ("import decimal, json, math, re, sqlite3, statistics, zoneinfo\nmath.isqrt(50)", "7"),
        ("import asyncio\nasync def f(): return 3\nasyncio.run(f())", "3"),
        ("import sys\nsys.exit()", "(no output; use print to see a value)"),
        ("import shutil\nopen('a', 'w').write('x')\nshutil.copy('a', 'b')\nopen('b').read()", "'x'"),
    ],
)
def test_what_a_program_prints_comes_back(code: str, output: str) -> None:
    message = run(python_tool(), code)
    assert (message.status, message.content) == ("success", output)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        (
            "print('a')\n1 / 0",
            'a\nTraceback (most recent call last):\n  File "<code>", line 2, in <module>\n    1 / 0\n',
        ),
        ("x = (", "SyntaxError: '(' was never closed\n(exit status 1)"),
        ("import sys\nsys.exit(3)", "(exit status 3)"),
        ("import sys\nsys.exit('too bad')", "too bad\n(exit status 1)"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'\n(exit status 1)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt\n(exit status 1)"),
    ],
)
def test_a_program_that_fails_says_how(code: str, output: str) -> None:
    message = run(python_tool(), code)
    assert message.status == "error"
    assert output in str(message.content)
    assert "confine.py" not in str(message.content)


def test_the_same_program_gives_the_same_bytes() -> None:
    code = "print({f'k{i}' for i in range(50)})\nraise ValueError([str(i) for i in range(9)])"
    assert run(python_tool(), code).content == run(python_tool(), code).content


def test_long_output_is_cut_in_the_middle() -> None:
    text = str(run(python_tool(), "for i in range(100_000): print(i)").content)
    assert text.startswith("0\n1\n")
    assert text.endswith("\n99999")
    assert "characters left out; print less of it)" in text
    assert len(text) < python_module.MAX_RESULT_CHARS + 100
    assert run(python_tool(), "#" * 200_000).status == "error"


def test_files_stay_in_a_given_folder_only(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    assert run(python_tool(work), "open('a.txt', 'w').write('kept')").status == "success"
    assert (work / "a.txt").read_text() == "kept"
    assert run(python_tool(), "import os\nopen('a.txt', 'w').write('gone')\nos.listdir()").content == "['a.txt']"
    assert os.listdir(tmp_path) == ["work"]
    with pytest.raises(ConfigError, match="is no folder"):
        python_tool(tmp_path / "missing")


def test_folders_deeper_than_any_path_are_noticed_and_removed(tmp_path: Path) -> None:
    message = run(python_tool(), "import os\nwhile True:\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)")
    assert "bytes to disk" in str(message.content)
    assert os.listdir(tmp_path) == []


async def test_programs_run_at_once_without_blocking_the_event_loop() -> None:
    tool = python_tool()
    beats, running = 0, asyncio.gather(*(tool.ainvoke(as_call(f"sum(range(10**6)) * 0 + {i}")) for i in range(4)))
    while not running.done():
        await asyncio.sleep(0)
        beats += 1
    assert [message.content for message in await running] == ["0", "1", "2", "3"]
    assert beats > 10


async def test_a_cancelled_call_kills_its_program(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    code = "import time\nopen('started', 'w').close()\ntime.sleep(60)\nopen('ended', 'w').close()"
    task = asyncio.create_task(python_tool(work, limits=Limits(seconds=120)).ainvoke(as_call(code)))
    while not (work / "started").exists():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while any(path.name.startswith("dlite-run-") for path in tmp_path.iterdir()):  # it goes when its process is gone
        await asyncio.sleep(0.01)
    assert os.listdir(work) == ["started"]


def test_a_program_ends_with_the_agent(tmp_path: Path) -> None:
    code = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(4)\nopen('ended', 'w')"
    work = tmp_path / "work"
    work.mkdir()
    agent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from dlite_agent.tools.process import run_confined as run;"
            "run(sys.argv[1], folder=Path(sys.argv[2]))",
            code,
            str(work),
        ],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    while not (work / "pid").exists() or not (pid := (work / "pid").read_text()):
        assert agent.poll() is None
    agent.kill()
    agent.wait()
    while Path("/proc", pid).exists() and "Z" not in Path("/proc", pid, "stat").read_text().rpartition(")")[2]:
        pass
    assert not any(path.name == "ended" for path in work.iterdir())


def test_programs_of_many_threads_do_not_mix() -> None:
    outputs: dict[int, bytes] = {}

    def work(number: int) -> None:
        outputs[number] = run_confined(f"print({number})", is_required=True).output

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {number: f"{number}\n".encode() for number in range(8)}


def test_limits_are_positive() -> None:
    with pytest.raises(ConfigError, match="seconds is 0"):
        Limits(seconds=0)


def test_looking_at_a_large_folder_takes_nothing_of_a_program_s_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, look = [0.0], process._used_bytes

    class Clock:
        sleep = staticmethod(time.sleep)

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + passed[0]

    def first_look(folders: Sequence[str]) -> float:
        passed[0] = 100.0
        return look(folders)

    monkeypatch.setattr(process, "time", Clock)
    monkeypatch.setattr(process, "_used_bytes", first_look)
    assert run_confined("print(1)", folder=tmp_path).text() == "1\n"
