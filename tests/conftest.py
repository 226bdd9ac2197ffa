"""What the engine's tests share: one compute thread, tiny targets made once, where the golden vectors lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dlite_agent.engine.target import Target
from dlite_agent.testing import tiny_target


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute on one thread: the tensors are tiny, and other processes run on the same cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=("llama", "qwen2", "qwen3", "gemma3_text"))
def target(request: pytest.FixtureRequest) -> Target:
    """A tiny target of each family; tests leave its taps as they are."""
    return tiny_target(request.param)


@pytest.fixture(scope="session")
def llama() -> Target:
    """A tiny target for what does not depend on the family; tests leave its taps as they are."""
    return tiny_target("llama")


@pytest.fixture(scope="session")
def golden_vectors() -> Path:
    """The folder of the reference checkpoints and their recorded outputs."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "golden" / "dlite_v1"
    if not folder.is_dir():
        pytest.skip(f"no golden vectors at {folder}")
    return folder


@pytest.fixture
def command_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands run offline on one thread, in a home of their own, and print wide tables."""
    monkeypatch.setenv("DLITE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DLITE_OFFLINE", "1")
    monkeypatch.setenv("DLITE_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")
