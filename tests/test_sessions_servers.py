"""Sessions and checkpoints on every kind of server that REDIS_URL can name, through what people call."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    empty_checkpoint,
)
from langgraph.checkpoint.conformance import checkpointer_test, validate
from redis.crc import key_slot

from dlite_agent import ChatDLite
from dlite_agent.cli import main
from dlite_agent.config import Settings
from dlite_agent.errors import FencedError, RecordError, StoreUnavailableError
from dlite_agent.runtime import close_all
from dlite_agent.sessions.checking import verify
from dlite_agent.sessions.client import RedisClient, server_version
from dlite_agent.sessions.collecting import collect_garbage, remove_session
from dlite_agent.sessions.creating import fork_session
from dlite_agent.sessions.embedded import connect
from dlite_agent.sessions.inventory import take_inventory
from dlite_agent.sessions.keys import Keys, SessionName, session_id, thread_hash
from dlite_agent.sessions.opening import open_store
from dlite_agent.sessions.records import Snapshot
from dlite_agent.sessions.saver import RedisSaver
from dlite_agent.sessions.store import SessionStore
from dlite_agent.sessions.threads import Thread
from dlite_agent.sessions.transfer import export_session, import_session
from dlite_agent.testing import write_tiny_chat_model
from tests.servers import Place, cluster, one_server, program, sentinels, tls_server, unix_server, valkey

Commit = Callable[..., Snapshot]
ONE, TWO = SessionName("one", "model"), SessionName("two", "model")
PASSWORD = "p@ss:word/?#%"
QUOTED = "p%40ss%3Aword%2F%3F%23%25"
DOCUMENT = Path(__file__).parents[1] / "docs" / "SESSIONS.md"
NUM_CONFORMANCE_TESTS = 81


def granted(*purposes: str) -> list[str]:
    """The words that the document gives to ACL SETUSER, with those for some purposes on top."""
    user, more = re.findall(r"```\n(.+?)```", DOCUMENT.read_text(), re.DOTALL)[-2:]
    words: list[str] = user.removeprefix("ACL SETUSER").replace(">PASSWORD", f">{PASSWORD}").split()
    extra: dict[str, list[str]] = {}
    for line in more.splitlines():
        commands, _, purpose = line.partition("#")
        extra[purpose.strip()] = commands.split()
    return words + [word for purpose in ("dlite-agent doctor", *purposes) for word in extra[purpose]]


@contextmanager
def restricted(made: AbstractContextManager[Place], num_servers: int, *purposes: str) -> Iterator[Place]:
    """Servers on which the documented user is made, and no more than that is used."""
    with made as place:
        for position in range(num_servers):
            place.command(position, "ACL SETUSER", *granted(*purposes))
        yield Place(place.url.replace("://", f"://agent:{QUOTED}@"), place.ports, place.processes)


def with_protocol(made: AbstractContextManager[Place], protocol: int) -> AbstractContextManager[Place]:
    @contextmanager
    def wrapped() -> Iterator[Place]:
        with made as place:
            yield Place(f"{place.url}?protocol={protocol}", place.ports, place.processes)

    return wrapped()


PLACES: dict[str, Callable[[], AbstractContextManager[Place]]] = {
    "redis, RESP2": lambda: with_protocol(one_server(program("redis-server")), 2),
    "redis, RESP3": lambda: with_protocol(one_server(program("redis-server")), 3),
    "valkey, RESP2": lambda: with_protocol(one_server(valkey()), 2),
    "valkey, RESP3": lambda: with_protocol(one_server(valkey()), 3),
    "unix socket": lambda: unix_server(program("redis-server")),
    "TLS": lambda: tls_server(program("redis-server")),
    "least user": lambda: restricted(one_server(program("redis-server")), 1),
    "redis Cluster, least user": lambda: restricted(cluster(program("redis-server")), 3, "Cluster"),
    "valkey Cluster": lambda: cluster(valkey()),
    "redis Sentinel, least user": lambda: restricted(
        sentinels(program("redis-server"), program("redis-sentinel")), 2, "Sentinel"
    ),
    "valkey Sentinel": lambda: sentinels(valkey(), valkey()),
}


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Servers of each kind, one kind after the other."""
    with PLACES[request.param]() as running:
        yield running


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model."""
    return str(write_tiny_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def opened(place: Place, tmp_path: Path) -> Iterator[RedisClient]:
    """A client as every command and every model opens it."""
    client = connect(Settings(home=tmp_path, redis_url=place.url))
    yield client
    client.close()


@pytest.fixture
def store(opened: RedisClient, request: pytest.FixtureRequest) -> SessionStore:
    """A store of the test's own tenant."""
    return SessionStore(opened, tenant=request.node.name)


class DirectSaver(RedisSaver):
    """Its async methods are the sync ones, called on the event loop: no worker thread in between."""

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        return self.put(config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        self.put_writes(config, writes, task_id, task_path)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return self.get_tuple(config)

    async def alist(self, config: RunnableConfig | None, **more: Any) -> AsyncGenerator[CheckpointTuple, None]:
        for found in self.list(config, **more):
            yield found

    async def adelete_thread(self, thread_id: str) -> None:
        self.delete_thread(thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        self.delete_for_runs(run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self.copy_thread(source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        self.prune(thread_ids, strategy=strategy)


def thread(name: str = "thread", **more: str) -> RunnableConfig:
    return {"configurable": {"thread_id": name, "checkpoint_ns": "", **more}}


def put(saver: RedisSaver, config: RunnableConfig, value: Any) -> RunnableConfig:
    versions: dict[str, str | int | float] = {"value": saver.get_next_version(None, None)}
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"], checkpoint["channel_versions"] = {"value": value}, versions
    return saver.put(config, checkpoint, {"source": "loop", "step": 0, "run_id": "run"}, versions)


def value(saver: RedisSaver, config: RunnableConfig) -> Any:
    found = saver.get_tuple(config)
    assert found is not None
    return found.checkpoint["channel_values"]["value"]


@pytest.mark.parametrize("kind", [RedisSaver, DirectSaver])
async def test_the_saver_passes_every_conformance_test(store: SessionStore, kind: type[RedisSaver]) -> None:
    @checkpointer_test(name=kind.__name__)
    async def make() -> AsyncGenerator[RedisSaver, None]:
        yield kind(store.client, tenant=store.keys.tenant)

    report = await validate(make)
    assert [failure for result in report.results.values() for failure in result.failures] == []
    assert sum(result.tests_passed for result in report.results.values()) == NUM_CONFORMANCE_TESTS


def test_a_session_is_committed_read_forked_moved_removed_and_collected(
    store: SessionStore, commit_turn: Commit, tmp_path: Path
) -> None:
    commit_turn(store, ONE, range(20), [8, 8])
    snapshot = commit_turn(store, ONE, range(40), [8, 8, 16])
    assert_readable(store, ONE, snapshot)
    fork_session(store, ONE.sid, TWO)
    assert_readable(store, TWO, snapshot)
    assert {info.name for info in take_inventory(store).sessions} == {ONE, TWO}
    assert verify(store).findings == ()
    export_session(store, ONE.sid, tmp_path / "one")
    remove_session(store, ONE.sid)
    assert store.head(ONE.sid) is None
    assert_readable(store, TWO, snapshot)
    remove_session(store, TWO.sid)
    removed = collect_garbage(store, grace_s=0).num_removed
    assert (removed["block"], removed["side"]) == (3, 2)
    assert sum(kind.num_keys for kind in store.usage().values()) == 0
    import_session(store, tmp_path / "one")
    assert_readable(store, ONE, snapshot)
    assert verify(store).findings == ()


def assert_readable(store: SessionStore, name: SessionName, snapshot: Snapshot) -> None:
    head = store.head(name.sid)
    assert head is not None
    assert head.snapshot == snapshot.snapshot_id
    assert store.get_snapshot(name.sid, snapshot.snapshot_id) == snapshot
    chains = [ref.chain for ref in snapshot.blocks]
    assert [block and block.chain for block in store.get_blocks("target", chains)] == chains
    assert store.get_pivot("target", chains[-1], snapshot.num_kv - 1) is not None


def test_a_second_worker_fences_the_first(store: SessionStore, place: Place, tmp_path: Path) -> None:
    lease = store.acquire(ONE.sid)
    with closing(connect(Settings(home=tmp_path, redis_url=place.url))) as other:
        second = SessionStore(other, tenant=store.keys.tenant)
        theirs = second.acquire(ONE.sid)
        snapshot = Snapshot(parent=None, fingerprint="target", ids=b"", num_kv=0, blocks=(), pivot=False)
        with pytest.raises(FencedError, match="another worker"):
            store.commit(lease, snapshot)
        assert second.commit(theirs, snapshot).status == "committed"
        assert second.commit(theirs, snapshot).status == "duplicate"


def test_commands_use_the_server(
    store: SessionStore,
    place: Place,
    commit_turn: Commit,
    command_home: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commit_turn(store, ONE, range(20), [8, 8])
    monkeypatch.setenv("REDIS_URL", place.url)

    def run(action: str, *arguments: str) -> None:
        assert main(["sessions", action, "--tenant", store.keys.tenant, *arguments]) == 0

    assert main(["doctor"]) == 0
    assert re.search(r"server at REDIS_URL\W+(redis|valkey) [0-9]+\.[0-9]", capsys.readouterr().out)
    run("fork", "one", "two")
    for action in ("ls", "du", "gc", "verify"):
        run(action)
    run("rm", "one")
    assert [info.name for info in take_inventory(store).sessions] == [TWO]
    assert QUOTED not in capsys.readouterr().out


@pytest.mark.parametrize("place", ["TLS", "valkey Cluster", "valkey Sentinel"], indirect=True)
def test_a_model_takes_up_the_session_of_another_process(place: Place, model_folder: str, tmp_path: Path) -> None:
    replies = []
    for _ in range(2):
        settings = Settings(home=tmp_path, redis_url=place.url, threads=1, offline=True)
        model = ChatDLite(model=model_folder, settings=settings, max_tokens=8, session_store="auto")
        replies.append(model.invoke("hello", session_id="resumed"))
        close_all()
        open_store.cache_clear()  # as in a new process
    stats = [reply.response_metadata["dlite"]["stats"] for reply in replies]
    assert replies[0].content == replies[1].content
    assert [stat["reused_store"] > 0 for stat in stats] == [False, True]


def use_everything(client: RedisClient, commit_turn: Commit, folder: Path) -> None:
    """Call whatever sends a command of its own to the server."""
    store, saver = SessionStore(client), RedisSaver(client, ttl_s=100)
    snapshot = commit_turn(store, ONE, range(20), [8, 8])
    store.touch(ONE.sid, snapshot)
    assert_readable(store, ONE, snapshot)
    config = put(saver, put(saver, thread(), 1), 2)
    saver.put_writes(config, [("value", 3), ("__interrupt__", 4)], "task")
    take_inventory(store)
    assert verify(store).findings == ()
    export_session(store, ONE.sid, folder / "one")
    remove_session(store, ONE.sid)
    collect_garbage(store, grace_s=0)
    import_session(store, folder / "one")
    assert len(list(saver.list(None))) == 2
    saver.copy_thread("thread", "copy")
    saver.prune(["copy"])
    assert value(saver, thread()) == value(saver, thread("copy")) == 2
    saver.delete_for_runs(["run"])
    saver.delete_thread("thread")
    put(saver, thread(), 5)
    client.unlink(Thread.named("thread", saver.keys).index)
    with pytest.raises(RecordError):
        saver.prune(["thread"])


@pytest.mark.parametrize(
    ("make", "purposes"),
    [
        (lambda: one_server(program("redis-server")), ()),
        (lambda: sentinels(program("redis-server"), program("redis-sentinel")), ("Sentinel",)),
        (lambda: cluster(program("redis-server")), ("Cluster",)),
    ],
    ids=["one server", "Sentinel", "Cluster"],
)
def test_the_document_grants_the_commands_that_are_used_and_no_others(
    make: Callable[[], AbstractContextManager[Place]], purposes: tuple[str, ...], commit_turn: Commit, tmp_path: Path
) -> None:
    num_servers = {"": 1, "Sentinel": 2, "Cluster": 3}["".join(purposes)]
    used: set[str] = set()
    with restricted(make(), num_servers, *purposes) as place:
        for position in range(num_servers):
            place.command(position, "CONFIG SET", "maxmemory-policy", "volatile-lfu")  # it knows no idle times
            place.command(position, "CONFIG RESETSTAT")
        with closing(connect(Settings(home=tmp_path, redis_url=place.url))) as client:
            server_version(client)
            use_everything(client, commit_turn, tmp_path)
        for position in range(num_servers):
            stats = place.command(position, "INFO", "commandstats")
            used |= {name.removeprefix("cmdstat_") for name, stat in stats.items() if stat["calls"]}
    allowed = {word[1:] for word in granted(*purposes) if word.startswith("+")}
    sent_by_others = {"config|resetstat", "publish", "subscribe", "replconf", "psync", "pexpireat"}
    always_allowed = {"auth", "hello"}
    assert used - sent_by_others - always_allowed == allowed


@pytest.mark.parametrize("binary", ["redis", "valkey"])
def test_a_failover_loses_nothing_that_was_replicated_and_is_never_a_new_session(
    binary: str, commit_turn: Commit, tmp_path: Path
) -> None:
    programs = (valkey(), valkey()) if binary == "valkey" else (program("redis-server"), program("redis-sentinel"))
    running = sentinels(*programs, down_after_ms=1000)
    with running as place, closing(connect(Settings(home=tmp_path, redis_url=place.url))) as client:
        store, saver = SessionStore(client), RedisSaver(client)
        snapshot = commit_turn(store, ONE, range(20), [8, 8])
        config = put(saver, thread(), "before")
        assert client.wait(1, 5000) == 1
        place.processes[0].kill()
        num_errors = 0
        while True:  # nothing is ever absent: an error, or what was there
            try:
                assert value(saver, thread()) == "before"
                assert_readable(store, ONE, snapshot)
                break
            except StoreUnavailableError:
                num_errors += 1
                assert num_errors < 100
        assert client.info("replication")["role"] == "master"
        following = commit_turn(store, ONE, range(40), [8, 8, 16])
        assert following.parent == snapshot.snapshot_id
        assert value(saver, put(saver, config, "after")) == "after"
        assert verify(store).findings == ()


def test_a_primary_that_became_a_replica_is_not_believed(tmp_path: Path) -> None:
    """For a while the Sentinels still name it, and what it holds may be anything."""
    running = sentinels(program("redis-server"), program("redis-sentinel"))
    with running as place, closing(connect(Settings(home=tmp_path, redis_url=place.url))) as client:
        saver = RedisSaver(client)
        put(saver, thread(), "there")
        place.command(0, "REPLICAOF", "127.0.0.1", 1)
        place.command(0, "CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")
        with pytest.raises(StoreUnavailableError, match="is a slave"):
            saver.get_tuple(thread())


def test_a_lost_node_of_a_cluster_is_an_error_never_a_miss(commit_turn: Commit, tmp_path: Path) -> None:
    with cluster(valkey()) as place, closing(connect(Settings(home=tmp_path, redis_url=place.url))) as client:
        store, saver = SessionStore(client), RedisSaver(client)
        snapshot = commit_turn(store, ONE, range(20), [8, 8])
        put(saver, thread(), "there")
        cluster_client: Any = client
        lost = cluster_client.get_node_from_key(store.keys.head(ONE.sid)).port
        place.processes[place.ports.index(lost)].kill()
        calls: list[Callable[[], Any]] = [
            lambda: store.head(ONE.sid),
            lambda: store.acquire(ONE.sid),
            lambda: store.get_snapshot(ONE.sid, snapshot.snapshot_id),
            lambda: commit_turn(store, ONE, range(40), [8, 8, 16]),
            lambda: take_inventory(store),
            lambda: list(saver.list(None)),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailableError):
                call()


def test_the_keys_of_a_session_and_of_a_thread_lie_in_one_slot() -> None:
    keys = Keys("tenant")
    for name in ("one", "{}", "}{", "{x}"):
        sid, hashed = session_id(name), thread_hash(name)
        own = {key_slot(key.encode()) for key in (keys.head(sid), keys.snapshot(sid, "0" * 64))}
        assert own == {key_slot(sid.encode())}
        both = {key_slot(key.encode()) for key in (keys.checkpoint_data(hashed), keys.checkpoint_index(hashed))}
        assert both == {key_slot(hashed.encode())}
