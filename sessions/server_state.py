"""What the embedded server's data folder remembers about it, and where its socket is."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dlite_agent.errors import ServerStartError

_SOCKET_NAME = "redis.sock"
_MAX_SOCKET_BYTES = 100  # Linux takes 107 bytes, macOS 103
_PRIVATE = "dlite-"  # what the name of a folder starts with that was made for a socket


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a data folder remembers about its server.

    Attributes:
        socket: Path of the unix socket.
        port: TCP port on 127.0.0.1, or None.
        keep: Whether the server stays when its last user leaves.
    """

    socket: str
    port: int | None
    keep: bool


def make_socket_path(folder: Path) -> str:
    """Choose a path short enough for a socket, after removing what an earlier server left.

    Raises:
        ServerStartError: If there is none.
    """
    remove_socket(folder)
    path = folder / _SOCKET_NAME
    if len(os.fsencode(path)) <= _MAX_SOCKET_BYTES:
        return str(path)
    for base in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(base)) + 32 <= _MAX_SOCKET_BYTES:
            return str(Path(tempfile.mkdtemp(prefix=_PRIVATE, dir=base)) / _SOCKET_NAME)
    raise ServerStartError(
        f"{path} is too long for a socket and so is TMPDIR; set DLITE_HOME or TMPDIR to a short path"
    )


def remove_socket(folder: Path) -> None:
    """Remove the socket of a server that is gone, and the private folder it may have had; nothing that is no socket."""
    path = Path(read_state(folder).socket)
    if path.is_socket():
        path.unlink(missing_ok=True)
    if path.parent != folder and path.parent.name.startswith(_PRIVATE):
        with suppress(OSError):
            path.parent.rmdir()


def read_state(folder: Path) -> ServerState:
    """Read what a folder remembers; the usual if that is nothing, nonsense, or of the folder it was copied from."""
    try:
        data = json.loads((folder / "server.json").read_text())
        if _is_same(Path(data["folder"]), folder):
            return ServerState(str(data["socket"]), data["port"], bool(data["keep"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    return ServerState(str(folder / _SOCKET_NAME), None, False)


def write_state(folder: Path, state: ServerState) -> None:
    """Have a folder remember a server, at once or not at all."""
    draft = folder / "server.json.new"
    draft.write_text(json.dumps({**asdict(state), "folder": str(folder)}))
    draft.replace(folder / "server.json")


def _is_same(named: Path, folder: Path) -> bool:
    try:
        return named.samefile(folder)
    except OSError:  # gone, or another user's
        return False
