"""The embedded server: one per folder however many processes start it, and nothing lost however they end."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from dlite_agent.config import Settings
from dlite_agent.errors import ConfigError, DLiteError, ServerStartError, StoreUnavailableError
from dlite_agent.sessions import embedded, locks
from dlite_agent.sessions.embedded import EmbeddedServer, connect, find_server, version

WORKER = """
import sys
from pathlib import Path
from dlite_agent.config import Settings
from dlite_agent.sessions.embedded import connect
client = connect(Settings(home=Path(sys.argv[1]), redis_url=None), keep=sys.argv[2] == "keep")
client.incr("workers")
print(client.info("server")["process_id"], flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose server is stopped at the end, whatever a test left running."""
    yield tmp_path
    for lock in tmp_path.rglob("server.lock"):
        EmbeddedServer.start(lock.parent).stop()


def is_running(folder: Path) -> bool:
    with locks.opened_lock(folder / "server.lock") as lock:
        return not locks.try_lock(lock)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def run(server: EmbeddedServer, *command: str) -> Any:
    with server.client() as client:
        return client.execute_command(*command)


def server_pid(server: EmbeddedServer) -> int:
    return int(run(server, "INFO", "server")["process_id"])


def start_worker(home: Path, keep: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(home), keep]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(worker: subprocess.Popen[str]) -> int:
    assert worker.stdout is not None
    return int(worker.stdout.readline())


def end(worker: subprocess.Popen[str]) -> None:
    worker.communicate("\n", timeout=30)
    assert worker.returncode == 0


def test_the_server_has_no_port_and_appends_every_write(home: Path) -> None:
    with EmbeddedServer.start(home / "server") as server:
        expected = {"port": "0", "appendonly": "yes", "appendfsync": "everysec", "save": ""}
        expected["maxmemory-policy"] = "volatile-lru"
        with server.client() as client:
            assert {name: client.config_get(name)[name] for name in expected} == expected
        assert stat.S_IMODE((home / "server").stat().st_mode) == 0o700
        assert stat.S_IMODE(Path(server.state.socket).stat().st_mode) == 0o700
        assert os.getsid(server_pid(server)) != os.getsid(0)
    assert not is_running(home / "server")


def test_a_second_user_attaches_and_the_last_one_stops_it(home: Path) -> None:
    first = EmbeddedServer.start(home / "server")
    second = EmbeddedServer.start(home / "server")
    assert server_pid(first) == server_pid(second)
    first.close()
    first.close()
    assert run(second, "PING")
    second.close()
    assert not is_running(home / "server")


def test_processes_that_start_at_once_share_one_server(home: Path) -> None:
    workers = [start_worker(home) for _ in range(3)]
    assert len({answer(worker) for worker in workers}) == 1
    with EmbeddedServer.start(home / "server") as server:
        assert run(server, "GET", "workers") == b"3"
        for worker in workers:
            end(worker)
        assert is_running(home / "server")
    assert not is_running(home / "server")


@pytest.mark.parametrize("keep", ["keep", ""])
def test_the_server_survives_the_kill_of_its_launcher(home: Path, keep: str) -> None:
    worker = start_worker(home, keep)
    pid = answer(worker)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    assert is_running(home / "server")
    second = start_worker(home)
    assert answer(second) == pid
    end(second)
    assert is_running(home / "server") == bool(keep)
    with EmbeddedServer.start(home / "server") as server:
        assert run(server, "GET", "workers") == b"2"


def test_one_user_that_asks_keeps_the_server(home: Path) -> None:
    first = EmbeddedServer.start(home / "server")
    second = EmbeddedServer.start(home / "server", keep=True)
    second.close()
    first.close()
    assert is_running(home / "server")
    third = EmbeddedServer.start(home / "server")
    third.stop()
    assert not is_running(home / "server")


def test_a_killed_server_leaves_a_stale_socket_and_all_its_data(home: Path) -> None:
    server = EmbeddedServer.start(home / "server")
    run(server, "SET", "a", "b")
    os.kill(server_pid(server), signal.SIGKILL)
    wait_for(lambda: not is_running(home / "server"))
    assert Path(server.state.socket).exists()
    assert (home / "server" / "server.pid").exists()
    with EmbeddedServer.start(home / "server") as again:
        assert run(again, "GET", "a") == b"b"
        server.close()
        assert run(again, "GET", "a") == b"b"


def test_a_folder_without_memory_of_its_server_attaches_all_the_same(home: Path) -> None:
    with EmbeddedServer.start(home / "server") as server:
        (home / "server" / "server.json").write_text("{")
        with EmbeddedServer.start(home / "server") as again:
            assert server_pid(again) == server_pid(server)


@pytest.mark.parametrize("name", ["with space", "quote'\"s", "\N{SNOWMAN} é", "a" * 150])
def test_a_folder_may_have_any_name(home: Path, name: str) -> None:
    folder = home / name
    with EmbeddedServer.start(folder) as server:
        run(server, "SET", "a", "b")
        path = Path(server.state.socket)
        assert len(os.fsencode(path)) <= 100
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert (folder / "appendonlydir").is_dir()
        with EmbeddedServer.start(folder) as again:
            assert server_pid(again) == server_pid(server)
    assert not path.exists()
    assert path.parent == folder or not path.parent.exists()
    with EmbeddedServer.start(folder) as server:
        assert run(server, "GET", "a") == b"b"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nothing_but_a_socket_is_removed_whatever_the_folder_says(home: Path) -> None:
    folder, precious = home / "server", home / "precious"
    folder.mkdir()
    precious.touch()
    (folder / "server.json").write_text(
        json.dumps({"socket": str(precious), "port": None, "keep": False, "folder": str(folder)})
    )
    with EmbeddedServer.start(folder) as server:
        assert server.state.socket == str(folder / "redis.sock")
    assert precious.exists()


def test_a_copy_of_a_folder_leaves_the_originals_server_alone(home: Path) -> None:
    with EmbeddedServer.start(home / "server") as original:
        run(original, "SET", "a", "b")
        shutil.copytree(home / "server", home / "copy", ignore=shutil.ignore_patterns("*.sock"))
        with EmbeddedServer.start(home / "copy") as copy:
            assert server_pid(copy) != server_pid(original)
        assert run(original, "GET", "a") == b"b"


def test_a_pid_that_is_anothers_by_now_is_left_alone(home: Path) -> None:
    server = EmbeddedServer.start(home / "server")
    with subprocess.Popen(["sleep", "60"]) as other:
        (home / "server" / "server.pid").write_text(str(other.pid))
        server.stop()
        assert not is_running(home / "server")
        assert other.poll() is None
        other.kill()


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(Settings(home=tmp_path, redis_url=None))
    server = EmbeddedServer.start(tmp_path / "server")
    pid = server_pid(server)
    shutil.rmtree(tmp_path / "server")
    for end_it in (server.stop, server.close):
        with pytest.raises(ServerStartError, match="No such file"):
            end_it()
    del client
    gc.collect()
    assert "may still run" in caplog.text
    os.kill(pid, signal.SIGKILL)


def test_a_port_can_be_asked_for(home: Path) -> None:
    port = free_port()
    with EmbeddedServer.start(home / "server", port=port):
        client = redis.Redis(port=port)
        assert client.ping()
        client.close()
        with pytest.raises(ServerStartError, match="stop it first"):
            EmbeddedServer.start(home / "server", port=port + 1)


def test_a_port_in_use_is_one_line(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerStartError, match=f"port {port} is in use; choose another") as caught:
            EmbeddedServer.start(home / "server", port=port)
    assert "\n" not in str(caught.value)
    assert not is_running(home / "server")
    with EmbeddedServer.start(home / "server") as server:
        assert run(server, "PING")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerStartError, match="set DLITE_HOME") as caught:
        EmbeddedServer.start(tmp_path / "file" / "server")
    assert "\n" not in str(caught.value)


def test_a_disk_without_room_is_one_line(home: Path) -> None:
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from dlite_agent.errors import ServerStartError\n"
        "from dlite_agent.sessions.embedded import EmbeddedServer\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try: EmbeddedServer.start(Path(sys.argv[1]))\n"
        "except ServerStartError as error: print(error)\n"
    )
    command = [sys.executable, "-c", script, str(home / "server")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert "free space" in done.stdout
    assert done.stdout.count("\n") == 1


def test_a_server_that_cannot_start_says_why(home: Path) -> None:
    (home / "server" / "appendonlydir").mkdir(parents=True)
    (home / "server" / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense")
    with pytest.raises(ServerStartError, match=r"stopped while starting \(.+\); read .+server\.log") as caught:
        EmbeddedServer.start(home / "server")
    assert "\n" not in str(caught.value)
    (home / "server" / "appendonlydir" / "appendonly.aof.manifest").unlink()


def test_without_a_server_program_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerStartError, match=r"dlite-agent\[embedded\]"):
        find_server()
    (tmp_path / "redis-server").symlink_to("/bin/true")
    assert find_server() == tmp_path / "redis-server"


@pytest.mark.parametrize(
    ("number", "has_newer_data", "expected"),
    [("6.0.16", False, "6.2"), ("6.2.14", True, "7.0"), ("nonsense", False, "6.2")],
)
def test_a_server_that_is_too_old_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, has_newer_data: bool, expected: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "redis-server"
    program.write_text(f"#!/bin/sh\necho 'Redis server v={number} sha=00000000:0'\n")
    program.chmod(0o755)
    folder = tmp_path / "server"
    (folder / "appendonlydir" if has_newer_data else folder).mkdir(parents=True)
    with pytest.raises(ServerStartError, match=rf"expected Redis {expected} or newer.*dlite-agent\[embedded\]"):
        EmbeddedServer.start(folder)
    assert not (folder / "server.json").exists()


def test_data_of_another_server_are_not_called_damaged(home: Path) -> None:
    data = home / "server" / "appendonlydir"
    data.mkdir(parents=True)
    (data / "appendonly.aof.manifest").write_text("file appendonly.aof.1.base.rdb seq 1 type b\n")
    (data / "appendonly.aof.1.base.rdb").write_bytes(b"REDIS9999")
    with pytest.raises(ServerStartError, match="the server program that wrote them") as caught:
        EmbeddedServer.start(home / "server")
    assert "--fix" not in str(caught.value)
    shutil.rmtree(data)


def test_the_version_is_told() -> None:
    assert version(find_server()).split()[-1][0].isdigit()
    with pytest.raises(ServerStartError, match="does not run"):
        version(Path("/nonexistent/valkey-server"))


def test_a_forks_end_does_not_stop_the_server(home: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from dlite_agent.sessions.embedded import EmbeddedServer\n"
        "server = EmbeddedServer.start(Path(sys.argv[1]))\n"
        "if os.fork() == 0: server.close(); os._exit(0)\n"
        "os.wait(); print(server.client().ping()); server.close()\n"
    )
    command = [sys.executable, "-c", script, str(home / "server")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"
    assert not is_running(home / "server")


def test_a_dropped_client_ends_the_use_of_the_server(home: Path) -> None:
    client = connect(Settings(home=home, redis_url=None))
    assert client.ping()
    assert is_running(home / "server")
    client.close()
    del client
    wait_for(lambda: not is_running(home / "server"))


def test_a_client_that_is_dropped_while_another_starts_does_not_wait_for_itself(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=home, redis_url=None)
    clients = [connect(settings)]
    attach = embedded._attach_or_launch

    def dropping(*args: Any, **kwargs: Any) -> Any:
        state = attach(*args, **kwargs)
        clients.pop()  # as when garbage is collected just then
        gc.collect()
        return state

    monkeypatch.setattr(embedded, "_attach_or_launch", dropping)
    with connect(settings) as client:
        assert client.ping()  # and the one that left did not stop it
    folder = settings.server_dir
    del client
    gc.collect()
    wait_for(lambda: not is_running(folder))


def test_a_redis_url_is_used_instead(home: Path) -> None:
    with EmbeddedServer.start(home / "other") as other:
        url = f"unix://{other.state.socket}"
        client = connect(Settings(home=home, redis_url=url))
        client.set("a", "b")
        client.close()
        assert run(other, "GET", "a") == b"b"
        assert not (home / "server").exists()


@pytest.mark.parametrize(
    ("url", "expected"),
    [("http://localhost", ConfigError), ("unix:///nonexistent/redis.sock", StoreUnavailableError)],
)
def test_a_redis_url_that_leads_nowhere_is_one_line(url: str, expected: type[DLiteError], tmp_path: Path) -> None:
    with pytest.raises(expected, match="REDIS_URL") as caught:
        connect(Settings(home=tmp_path, redis_url=url))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "server").exists()
