"""What the engine's tests share: one compute thread, tiny targets made once, where the golden vectors lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import redis
import torch

from dlite_agent.engine.target import Target
from dlite_agent.sessions.embedded import EmbeddedServer
from dlite_agent.sessions.keys import SessionName, chain_blocks, chain_root, ids_to_bytes
from dlite_agent.sessions.records import Block, SideRow, Snapshot
from dlite_agent.sessions.store import SessionStore
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server of the test module's own."""
    with EmbeddedServer.start(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    """A client of the module's server, which is emptied first."""
    opened = server.client()
    opened.flushall()
    yield opened
    opened.close()


@pytest.fixture
def command_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands run offline on one thread, in a home of their own, and print wide tables."""
    monkeypatch.setenv("DLITE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DLITE_OFFLINE", "1")
    monkeypatch.setenv("DLITE_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Types lines into an interactive command, and then ends its input."""

    def type_them(*lines: str) -> None:
        left = iter(lines)

        def ask(*_: object) -> str:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", ask)

    return type_them


@pytest.fixture
def ran() -> list[tuple[int, int]]:
    """The arguments of each run of `add`."""
    return []


@pytest.fixture
def add(ran: list[tuple[int, int]]) -> Callable[[int, int], int]:
    """A tool that notes its runs."""

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        ran.append((a, b))
        return a + b

    return add


Committer = Callable[..., Snapshot]


@pytest.fixture
def commit_turn() -> Committer:
    """Commits a turn of a named session, as a worker would: snapshot, blocks of its new tokens, pivot row."""

    def commit(
        store: SessionStore,
        name: SessionName,
        tokens: Sequence[int],
        counts: Sequence[int],
        *,
        target: str = "target",
        is_named: bool = True,
    ) -> Snapshot:
        lease = store.acquire(name.sid, name=name if is_named else None)
        chains = chain_blocks(chain_root(target, store.codec.secret), tokens, counts)
        blocks = [
            Block(chain, n, "float32", (2, n, 8), os.urandom(64 * n)) for chain, n in zip(chains, counts, strict=True)
        ]
        num_kv = sum(counts)
        snapshot = Snapshot(
            parent=lease.snapshot,
            fingerprint=target,
            ids=ids_to_bytes(tokens),
            num_kv=num_kv,
            blocks=tuple(block.ref() for block in blocks),
            pivot=True,
        )
        pivot = SideRow(chains[-1], num_kv - 1, "float32", (5, 8), os.urandom(160))
        assert store.commit(lease, snapshot, blocks=blocks, pivot=pivot).status == "committed"
        return snapshot

    return commit
