"""Every example runs as it stands, on a tiny target with random weights: it says noise, and reuses what it should."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlite_agent.runtime import close_all
from dlite_agent.sessions.embedded import EmbeddedServer
from dlite_agent.testing import write_tiny_chat_model

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def tiny(tmp_path: Path, command_home: None, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("REDIS_URL", f"unix://{server.state.socket}")
    yield str(write_tiny_chat_model(tmp_path / "model", max_position_embeddings=16_384))
    close_all()


@pytest.fixture
def run(tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the main function of an example; returns what it printed."""

    def run_example(name: str, *args: str) -> str:
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # annotations are looked up there
        spec.loader.exec_module(module)
        module.main(tiny, *args)
        return capsys.readouterr().out

    return run_example


def figures(pattern: str, text: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, found if isinstance(found, tuple) else (found,))) for found in re.findall(pattern, text)]


def test_react_loop(run: Callable[..., str]) -> None:
    assert "What is 12.5 times 8?" in run("react_loop")


def test_fork_and_time_travel(run: Callable[..., str]) -> None:
    said = run("fork_and_time_travel")
    (_, _), second, fork, after = figures(r"(\d+) tokens of the prompt were there, (\d+) were computed", said)
    assert fork[0] >= second[0]  # the fork starts from the same rows
    assert after[0] > fork[0] and max(second[1], fork[1], after[1]) < 80
    assert "by ship" in said.rpartition("the thread now holds")[2]
    assert "eat" not in said.rpartition("the thread now holds")[2]


def test_multi_agent_shared_prefix(run: Callable[..., str]) -> None:
    first, *others = figures(r"(\d+) tokens from the store, (\d+) computed", run("multi_agent_shared_prefix"))
    assert first[0] == 0 and len(others) == 2
    assert all(from_store > 400 and computed < first[1] / 3 for from_store, computed in others)


@pytest.mark.parametrize("decision", ["approve", "reject"])
def test_hitl_approval(run: Callable[..., str], decision: str) -> None:
    said = run("hitl_approval", decision)
    assert ("sent to" in said) == (decision == "approve")
    ((reused, computed),) = figures(r"(\d+) tokens were there, (\d+) were computed", said)
    assert reused > computed


def test_existing_langgraph_graph(run: Callable[..., str]) -> None:
    first, second = figures(r"\((\d+) of (\d+) prompt tokens reused\)", run("existing_langgraph_graph"))
    assert second[0] >= first[1] - 1


def test_bfcl_live(run: Callable[..., str]) -> None:
    if importlib.util.find_spec("bfcl_eval") is None:
        pytest.skip("bfcl-eval is not installed; examples/bfcl_live.py says how")
    said = run("bfcl_live")
    assert said.count("user: ") == 2 and "model:" in said
    assert "the end state differs" in said  # random weights copy no files


def test_bfcl_live_says_what_to_install(tiny: str) -> None:
    hide = "import runpy, sys; sys.modules['bfcl_eval'] = None; sys.argv = sys.argv[1:]; "
    command = [sys.executable, "-c", f"{hide}runpy.run_path(sys.argv[0], run_name='__main__')"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")))}
    arguments = [str(EXAMPLES / "bfcl_live.py"), tiny]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith("pip install --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0")


@pytest.mark.slow
def test_resume_after_crash(tiny: str) -> None:
    command = [sys.executable, str(EXAMPLES / "resume_after_crash.py"), tiny]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"exit code {-signal.SIGKILL}" in done.stdout
    reused = figures(r"(\d+) tokens from RAM, (\d+) from Redis, (\d+) computed", done.stdout.partition("--- killed")[2])
    assert reused[0][0] == 0 and reused[0][1] > reused[0][2]
    assert reused[1][0] > reused[0][1]  # the next turn has it all in RAM
