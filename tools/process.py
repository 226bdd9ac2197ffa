"""Runs Python source in a confined process: bounded in time, memory, files and output, and killed with all it started.

What may hang or grow for a hostile input runs here and not in the agent's process: a model's programs, its SQL, its
regular expressions, and the reading of web pages. A thread of the agent could be neither bounded nor stopped.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import functools
import json
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Literal

from langchain_core.tools import ToolException

from dlite_agent.errors import ConfigError
from dlite_agent.tools import confine

STOP: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("STOP", default=None)
"""Set by the asynchronous form of a tool; an event that is set kills the process of a call nobody waits for."""

_SLOTS = threading.BoundedSemaphore(4)
"""How many processes run at once; a model may ask for many in one message, and their memory adds up."""

_TICK_S = 0.1
_LEAST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use.

    Attributes:
        seconds: Wall time.
        cpu_seconds: Processor time, whole seconds.
        memory_bytes: Address space, the interpreter's own 30 MB included.
        file_bytes: Size of any one file it writes.
        disk_bytes: By how much the folders it may write to may grow, a file or folder counting as 4 KiB at least;
            looked at ten times a second, and less often in folders of very many files.
        open_files: File descriptors.
        output_bytes: Standard output and errors together; a run that writes more is stopped.
    """

    seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 << 20
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    open_files: int = 64
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ConfigError(f"{name} is {value}; expected a positive number")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: what it wrote, its exit status (negative: the signal), and why it was stopped, if it was."""

    output: bytes
    status: int
    stopped: Literal["time", "output", "disk", "cancelled"] | None = None

    def text(self) -> str:
        """Return the output; bytes that are not UTF-8 are replaced."""
        return self.output.decode("utf-8", errors="replace")


def run_confined(
    source: str,
    *,
    stdin: bytes = b"",
    limits: Limits | None = None,
    read: Sequence[Path] = (),
    write: Sequence[Path] = (),
    folder: Path | None = None,
    is_required: bool = False,
    is_quiet: bool = False,
) -> Outcome:
    """Run a Python program with the standard library, no network and no other process; four run at once at most.

    Args:
        source: The program.
        stdin: Its standard input.
        limits: What it may use.
        read: Files and folders it may read besides the standard library.
        write: Files and folders it may read and change.
        folder: Where it runs, and may write; a new folder that is removed afterwards if None.
        is_required: Refuse to run where the operating system cannot confine files and network.
        is_quiet: Leave Python's warnings out of the output.

    Raises:
        ConfigError: If it was required to be confined and cannot be.
    """
    limits = limits or Limits()
    with _SLOTS, _scratch_folder() as scratch:
        cwd = str(folder or scratch)
        granted = [scratch, *([cwd] if folder else []), *map(str, write)]
        spec = {
            "source": source,
            "cwd": cwd,
            "limits": asdict(limits),
            "read": list(map(str, read)),
            "write": granted,
            "is_required": is_required,
        }
        data = json.dumps(spec).encode()
        with _started(scratch, is_quiet=is_quiet) as process:
            outcome = _Run(process, len(data).to_bytes(8, "big") + data + stdin, limits, granted).finish()
    if is_required and outcome.output.startswith(confine.NOT_CONFINED):
        raise ConfigError("this system cannot confine programs (needs Linux with Landlock and seccomp filters)")
    return replace(outcome, output=outcome.output[1:])


@functools.cache
def require_confinement() -> None:
    """Raise ConfigError where programs cannot be confined; asked of the system once per process."""
    run_confined("", is_required=True)


def explain(outcome: Outcome, limits: Limits) -> str | None:
    """Return in one line which limit ended a run, or None if none did."""
    match outcome.stopped:
        case "time":
            return f"stopped after {limits.seconds:g} seconds"
        case "output":
            return f"stopped after {limits.output_bytes} bytes of output"
        case "disk":
            return f"stopped: it wrote more than {limits.disk_bytes} bytes to disk"
        case "cancelled":
            return "stopped: the call was cancelled"
    if outcome.status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"stopped after {limits.cpu_seconds} seconds of processor time"
    return f"it crashed ({signal.Signals(-outcome.status).name})" if outcome.status < 0 else None


def run_worker(
    name: str, arguments: object, *, limits: Limits, read: Sequence[Path] = (), write: Sequence[Path] = ()
) -> str:
    """Run one of this package's own programs on untrusted input and return what it printed.

    Args:
        name: Module of this package, run as a program; it reads JSON from standard input.
        arguments: What it reads.
        limits: What it may use.
        read: Files and folders it may read.
        write: Files and folders it may change.

    Raises:
        ToolException: If a limit ended it, or with what it printed before it exited with a status other than 0.
    """
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    data = json.dumps(arguments).encode()
    outcome = run_confined(source, stdin=data, limits=limits, read=read, write=write, is_quiet=True)
    if reason := explain(outcome, limits):
        raise ToolException(reason)
    if outcome.status:
        raise ToolException(outcome.text().strip().splitlines()[-1] if outcome.output.strip() else "no result")
    return outcome.text()


@contextlib.contextmanager
def _scratch_folder() -> Iterator[str]:
    """Make a folder and remove it, however deep a program has made it."""
    folder = tempfile.mkdtemp(prefix="dlite-run-")
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except RecursionError:
            subprocess.run(["rm", "-rf", "--", folder], check=False, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def _started(scratch: str, *, is_quiet: bool) -> Iterator[subprocess.Popen[bytes]]:
    """Start the interpreter in a session of its own; kill the whole of it in the end."""
    flags = ["-P", "-S", "-s", "-B", "-X", "utf8", *(["-W", "ignore"] if is_quiet else [])]
    process = subprocess.Popen(
        [sys.executable, *flags, confine.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=scratch,
        env={
            "PYTHONHASHSEED": "0",
            "PYTHONIOENCODING": "utf-8:backslashreplace",
            "HOME": scratch,
            "TMPDIR": scratch,
            "SQLITE_TMPDIR": scratch,
            "TZ": "UTC",
        },
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()


class _Run:
    """Feeds one process and drains it, within its limits."""

    def __init__(self, process: subprocess.Popen[bytes], data: bytes, limits: Limits, folders: list[str]) -> None:
        self._process = process
        self._left = memoryview(data)
        self._limits = limits
        self._folders = folders
        self._output = bytearray()
        self._most_disk = _used_bytes(folders) + limits.disk_bytes
        self._deadline = time.monotonic() + limits.seconds  # the look at large folders is not the program's time
        self._next_disk_look = 0.0
        self._stop = STOP.get()

    def finish(self) -> Outcome:
        """Wait for the end of the process or of what it may use."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with selectors.DefaultSelector() as selector:
            for stream, event in ((stdin, selectors.EVENT_WRITE), (stdout, selectors.EVENT_READ)):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, event)
            next_look = 0.0
            while selector.get_map() or self._process.poll() is None:
                if time.monotonic() >= next_look:
                    if reason := self._exceeded():
                        return Outcome(bytes(self._output), -signal.SIGKILL, reason)
                    next_look = time.monotonic() + _TICK_S
                if not selector.get_map():  # it closed its ends and goes on
                    time.sleep(_TICK_S / 10)
                    continue
                ready = selector.select(_TICK_S)
                if not ready and self._process.poll() is not None:
                    break  # what still holds the pipe is not the program
                for key, _ in ready:
                    self._write(selector, stdin) if key.fileobj is stdin else self._read(selector, stdout)
                if len(self._output) > self._limits.output_bytes:
                    kept = bytes(self._output[: self._limits.output_bytes])
                    return Outcome(kept, -signal.SIGKILL, "output")
        return Outcome(bytes(self._output), self._process.wait())

    def _exceeded(self) -> Literal["time", "disk", "cancelled"] | None:
        if self._stop is not None and self._stop.is_set():
            return "cancelled"
        if time.monotonic() >= self._deadline:
            return "time"
        return "disk" if self._has_filled_disk() else None

    def _has_filled_disk(self) -> bool:
        started = time.monotonic()
        if started < self._next_disk_look:
            return False
        used = _used_bytes(self._folders)
        ended = time.monotonic()
        self._next_disk_look = ended + 10 * (ended - started)
        return used > self._most_disk

    def _write(self, selector: selectors.BaseSelector, stream: IO[bytes]) -> None:
        try:
            self._left = self._left[os.write(stream.fileno(), self._left[: 1 << 16]) :]
        except BrokenPipeError:
            self._left = self._left[:0]
        if not self._left:
            selector.unregister(stream)
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _read(self, selector: selectors.BaseSelector, stream: IO[bytes]) -> None:
        part = os.read(stream.fileno(), 1 << 16)
        self._output += part
        if not part:
            selector.unregister(stream)


def _used_bytes(folders: Sequence[str]) -> float:
    """Return what all that lies below folders takes, no link followed; infinite where paths are too long to look."""
    total, left = 0, list(folders)
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    total += max(entry.stat(follow_symlinks=False).st_blocks * 512, _LEAST_BYTES)
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return math.inf
    return total
