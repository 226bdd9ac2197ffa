"""Redis-compatible servers of the benchmark's own: any program, any options, killed and started again on their data."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from dlite_agent.errors import ConfigError, ServerStartError
from dlite_agent.sessions.embedded import find_server, version

Fsync = Literal["everysec", "always"]
FSYNCS: tuple[Fsync, ...] = ("everysec", "always")
_START_S = 20.0
_POLL_S = 0.01


def find_servers(given: Path | None) -> tuple[Path, ...]:
    """List the server programs to measure: the one given, else the embedded one and `redis-server` if it is on PATH.

    Raises:
        ConfigError: If the one given is no file.
        ServerStartError: If there is none.
    """
    if given is not None:
        if not given.is_file():
            raise ConfigError(f"--server {given} is no file; give the path of a redis-server or valkey-server program")
        return (given,)
    found = [find_server()]
    other = shutil.which("redis-server")
    if other is not None and Path(other).resolve() != found[0].resolve():
        found.append(Path(other))
    return tuple(found)


class ScratchServer:
    """A server on a unix socket in a folder that is removed in the end."""

    def __init__(self, binary: Path, *, fsync: Fsync = "everysec") -> None:
        """Start the program; `fsync` is its `appendfsync`.

        Raises:
            ServerStartError: If it does not answer.
        """
        self.name = version(binary)
        self._folder = Path(tempfile.mkdtemp(prefix="dlite-bench-"))
        self.socket = str(self._folder / "s")
        self._command = [str(binary), *_flags(self._folder, self.socket, fsync)]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start it on the data there are, and wait until it has read them.

        Raises:
            ServerStartError: If it does not answer.
        """
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        with redis.Redis(unix_socket_path=self.socket, retry=Retry(NoBackoff(), 0)) as client:
            while True:
                with suppress(redis.RedisError):
                    client.ping()
                    return
                if time.monotonic() > deadline or self._process.poll() is not None:
                    last = (self._folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
                    raise ServerStartError(f"{self._command[0]} does not start: {' '.join(last)}")
                time.sleep(_POLL_S)

    def kill(self) -> None:
        """Send SIGKILL and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self, **options: object) -> redis.Redis:
        """Open a binary client; it tries twice more where a connection fails, unless options say otherwise."""
        fields: dict[str, object] = {"retry": Retry(ExponentialWithJitterBackoff(base=0.01, cap=0.05), 2), **options}
        return redis.Redis(unix_socket_path=self.socket, **fields)  # type: ignore[arg-type]

    def empty(self) -> None:
        """Remove all data and limits; a server that a run left dead is started again."""
        if self._process is None:
            self.start()
        with self.client() as client:
            client.config_set("maxmemory", 0)
            client.config_set("maxmemory-policy", "volatile-lru")
            client.flushall()

    def close(self) -> None:
        """Kill it and remove its data."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


class Servers:
    """One server per program and `appendfsync`, started when first asked for."""

    def __init__(self, binaries: tuple[Path, ...]) -> None:
        self.binaries = binaries
        self._running: dict[tuple[Path, Fsync], ScratchServer] = {}

    def get(self, binary: Path, fsync: Fsync) -> ScratchServer:
        """Return the server, emptied."""
        key = (binary, fsync)
        if key not in self._running:
            self._running[key] = ScratchServer(binary, fsync=fsync)
        self._running[key].empty()
        return self._running[key]

    def close(self) -> None:
        """Close all of them."""
        for server in self._running.values():
            server.close()
        self._running.clear()


@contextmanager
def running(binaries: tuple[Path, ...]) -> Iterator[Servers]:
    """Hold servers for the body."""
    servers = Servers(binaries)
    try:
        yield servers
    finally:
        servers.close()


def _flags(folder: Path, socket: str, fsync: Fsync) -> list[str]:
    options: Mapping[str, str] = {
        "port": "0",
        "unixsocket": socket,
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": fsync,
        "save": "",
        "maxmemory-policy": "volatile-lru",
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]
