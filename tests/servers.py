"""Real servers for tests: on free ports, each in a folder of its own, killed at the end whatever a test did.

A test that needs a program which is not there is skipped with the name of the package to install; `.ci/run` installs
them, so that there nothing is skipped.
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from dlite_agent.sessions.embedded import find_server

SERVICE = "agents"
_START_S = 30.0
_SLOTS = 16384


@dataclass(frozen=True, slots=True)
class Place:
    """Where running servers are.

    Attributes:
        url: What REDIS_URL says to use them.
        ports: Their TCP ports.
        processes: Their processes, in the same order.
    """

    url: str
    ports: tuple[int, ...] = ()
    processes: tuple[subprocess.Popen[bytes], ...] = field(default=(), repr=False)

    def command(self, position: int, *words: str | int) -> Any:
        """Send a command to one server as a user who may do everything."""
        return _command(self.ports[position], *words)


def valkey() -> str:
    """Return the Valkey server that this project brings along."""
    return str(find_server())


def program(name: str) -> str:
    """Return the path of a program, or skip the test."""
    package = {"openssl": "openssl", "redis-sentinel": "redis-sentinel"}.get(name, "redis-server")
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on PATH; install it, for example with `apt-get install {package}`")
    return found


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds; a server that does not answer counts as False."""
    deadline = time.monotonic() + _START_S
    while True:
        with suppress(redis.RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, f"{what} did not happen within {_START_S:.0f} s"
        time.sleep(0.02)


@contextmanager
def one_server(binary: str, *options: str) -> Iterator[Place]:
    """Run a server on a TCP port."""
    with _folder() as folder:
        (port,) = _free_ports(1)
        with _running([binary, *_basics(port), *options], folder) as process:
            _wait_until_ready(port)
            yield Place(f"redis://127.0.0.1:{port}/0", (port,), (process,))


@contextmanager
def unix_server(binary: str) -> Iterator[Place]:
    """Run a server on a unix socket."""
    with _folder() as folder:
        path = folder / "server.sock"
        with _running([binary, *_basics(0), "--unixsocket", str(path)], folder) as process:
            wait_for(path.exists, "the server's socket")
            yield Place(f"unix://{path}", processes=(process,))


@contextmanager
def tls_server(binary: str) -> Iterator[Place]:
    """Run a server that speaks TLS only, with a certificate of its own."""
    with _folder() as folder:
        certificate, key = _make_certificate(folder)
        (port,) = _free_ports(1)
        options = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
        options += ["--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no"]
        with _running([binary, *_basics(0), *options], folder) as process:
            wait_for(lambda: _is_listening(port), "the server's TLS port")
            yield Place(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}", (port,), (process,))


@contextmanager
def cluster(binary: str) -> Iterator[Place]:
    """Run a Cluster of three primaries."""
    with ExitStack() as stack:
        ports = _free_ports(3)
        processes = []
        for port in ports:
            folder = stack.enter_context(_folder())
            options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "5000"]
            processes.append(stack.enter_context(_running([binary, *_basics(port), *options], folder)))
        for port in ports:
            _wait_until_ready(port)
        for position, port in enumerate(ports):
            first, last = (_SLOTS * n // len(ports) for n in (position, position + 1))
            _command(port, "CLUSTER SET-CONFIG-EPOCH", position + 1)
            _command(port, "CLUSTER ADDSLOTS", *range(first, last))
            for other in ports[:position]:
                _command(port, "CLUSTER MEET", "127.0.0.1", other)
        for port in ports:
            wait_for(partial(_is_joined, port, len(ports)), "the Cluster")
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        yield Place(f"redis+cluster://{hosts}", ports, tuple(processes))


@contextmanager
def sentinels(binary: str, sentinel: str, *, down_after_ms: int = 10_000) -> Iterator[Place]:
    """Run a primary, its replica and three Sentinels; the primary comes first in the place.

    They take a primary for dead that was silent for `down_after_ms`, be it just that the machine is busy.
    """
    with ExitStack() as stack:
        primary, replica, *watchers = ports = _free_ports(5)
        replication = ["--repl-diskless-sync-delay", "0"]
        commands = [
            [binary, *_basics(primary), *replication],
            [binary, *_basics(replica), *replication, "--replicaof", "127.0.0.1", str(primary)],
        ]
        processes = [stack.enter_context(_running(command, stack.enter_context(_folder()))) for command in commands]
        _wait_until_ready(primary)
        wait_for(partial(_is_linked, replica), "the replica's link")
        for port in watchers:
            folder = stack.enter_context(_folder())
            (folder / "sentinel.conf").write_text(_sentinel_configuration(port, primary, down_after_ms))
            command = [sentinel, "sentinel.conf", "--sentinel"]
            processes.append(stack.enter_context(_running(command, folder)))
        for port in watchers:
            wait_for(partial(_sees_all, port), "the Sentinels")
        hosts = ",".join(f"127.0.0.1:{port}" for port in watchers)
        yield Place(f"redis+sentinel://{hosts}/{SERVICE}/0", ports, tuple(processes))


def _sentinel_configuration(port: int, primary: int, down_after_ms: int) -> str:
    return (
        f"port {port}\nbind 127.0.0.1\n"
        f"sentinel monitor {SERVICE} 127.0.0.1 {primary} 2\n"
        f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}\n"
        f"sentinel failover-timeout {SERVICE} 3000\n"
    )


def _basics(port: int) -> list[str]:
    return ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]


@contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="dlite-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def _running(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _free_ports(number: int) -> tuple[int, ...]:
    """Choose ports outside the range of outgoing connections, whose Cluster ports (10000 above) are free as well."""
    chosen: list[int] = []
    while len(chosen) < number:
        port = random.SystemRandom().randrange(10_000, 20_000)
        if port not in chosen and _is_free(port) and _is_free(port + 10_000):
            chosen.append(port)
    return tuple(chosen)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _command(port: int, *words: str | int) -> Any:
    with redis.Redis(port=port, retry=Retry(NoBackoff(), 0), socket_timeout=5.0) as client:
        return client.execute_command(*words)


def _wait_until_ready(port: int) -> None:
    wait_for(partial(_command, port, "PING"), f"an answer at port {port}")


def _is_linked(port: int) -> bool:
    return bool(_command(port, "INFO", "replication")["master_link_status"] == "up")


def _is_joined(port: int, num_nodes: int) -> bool:
    info = _command(port, "CLUSTER INFO")
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == num_nodes


def _sees_all(port: int) -> bool:
    state = _command(port, "SENTINEL MASTER", SERVICE)
    return (state["num-slaves"], state["num-other-sentinels"]) == (1, 2)


def _make_certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = [program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True, timeout=_START_S)
    return certificate, key
