"""A proxy between a client and a server that cuts, delays or shifts what passes, where it is told to."""

from __future__ import annotations

import queue
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self

_HEAD_COMMIT = re.compile(rb"EVALSHA.*[0-9a-f]{64}:[0-9]+:[0-9]+", re.DOTALL)
_BLOCK_BYTES = 512  # a reply this long is a record
Cut = Literal["before", "after"]


class Proxy:
    """Passes everything on until a fault is set; each fault happens once.

    Attributes:
        cut: Cut the connection of the next head commit, "before" the server gets it or "after", with its reply.
        delay_s: Seconds that every reply is held back.
        shift_at: Repeat the so-manieth long reply from now, so that all replies behind it are off by one.
        stale_at: Hold a copy of the so-manieth reply from now back, and send it in front of the next command's.
        is_refusing: Close every connection at once.
        num_faults: How many cuts and shifts there were.
    """

    def __init__(self, upstream: str) -> None:
        """Listen on a socket of its own in front of the server at `upstream`."""
        self._folder = tempfile.TemporaryDirectory(prefix="dlite-bench-")
        self.socket = str(Path(self._folder.name) / "p")
        self.cut: Cut | None = None
        self.delay_s = 0.0
        self.shift_at: int | None = None
        self.stale_at: int | None = None
        self.is_refusing = False
        self.num_faults = 0
        self._upstream = upstream
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.socket)
        self._listener.listen()
        self._run(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cut everything and wait for the threads."""
        _shut(self._listener)
        self._listener.close()
        for each in self._sockets:
            _shut(each)
        for thread in self._threads:
            thread.join(5)
        for each in self._sockets:
            each.close()
        self._folder.cleanup()

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.is_refusing:
                    near.close()
                    continue
                far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._sockets += [near, far]
                try:
                    far.connect(self._upstream)
                except OSError:  # the server is down: so is the proxy
                    _shut(near)
                    continue
                lost, stale = threading.Event(), queue.SimpleQueue[bytes]()
                self._run(self._requests, near, far, lost, stale)
                self._run(self._replies, far, near, lost, stale)

    def _requests(
        self, near: socket.socket, far: socket.socket, lost: threading.Event, stale: queue.SimpleQueue[bytes]
    ) -> None:
        with suppress(OSError):
            while data := near.recv(1 << 20):
                if self.cut and _HEAD_COMMIT.search(data):
                    self.num_faults += 1
                    lost.set()
                    cut, self.cut = self.cut, None
                    if cut == "after":
                        far.sendall(data)
                        continue  # the thread of the replies cuts when the answer is there
                    break
                if not stale.empty():
                    near.sendall(stale.get())
                far.sendall(data)
        _shut(near)
        _shut(far)

    def _replies(
        self, far: socket.socket, near: socket.socket, lost: threading.Event, stale: queue.SimpleQueue[bytes]
    ) -> None:
        with suppress(OSError, EOFError), far.makefile("rb") as stream:
            while True:
                reply = read_reply(stream)
                if lost.is_set():
                    break
                if self.delay_s:
                    time.sleep(self.delay_s)
                near.sendall(reply * (2 if self._is_shifted(reply) else 1))
                if self.stale_at is not None:
                    self.stale_at -= 1
                    if not self.stale_at:
                        self.stale_at = None
                        self.num_faults += 1
                        stale.put(reply)
        _shut(near)
        _shut(far)

    def _is_shifted(self, reply: bytes) -> bool:
        if self.shift_at is None or len(reply) < _BLOCK_BYTES:
            return False
        self.shift_at -= 1
        if self.shift_at > 0:
            return False
        self.shift_at = None
        self.num_faults += 1
        return True


def read_reply(stream: BinaryIO) -> bytes:
    """Read one reply of the Redis protocol, as it is.

    Raises:
        EOFError: If the stream ends before it does.
    """
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError
    kind, count = line[:1], line[1:-2]
    if kind in b"$=!" and count != b"-1":
        body = stream.read(int(count) + 2)
        if len(body) < int(count) + 2:
            raise EOFError
        return line + body
    if kind in b"*~>%" and count != b"-1":
        return line + b"".join(read_reply(stream) for _ in range(int(count) * (2 if kind == b"%" else 1)))
    return line


def _shut(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
