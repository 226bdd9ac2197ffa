"""Files of one folder, and of no other.

A path is walked one component at a time from an open descriptor of the root, never following a link, so
neither `..`, an absolute path nor a symbolic link leads out, even one put in place between check and use.
Writes go to a new file that is renamed over the old one: a killed process leaves the old or the new text.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from langchain_core.tools import ToolException

from dlite_agent.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_RESULT_CHARS = 16_000
MAX_ENTRIES = 200
MAX_DEPTH = 8
MAX_PARTS = 32

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DRAFT_PREFIX = ".dlite-draft-"


class Workspace:
    """File operations confined to one folder; each raises ToolException with one line for the model."""

    def __init__(self, root: Path) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.root = root.resolve(strict=True)
        except OSError as error:
            raise ConfigError(f"workspace {root} cannot be used: {error.strerror}; give a folder") from error
        self._writing = threading.Lock()  # an agent may make several calls at once

    def list_files(self, path: str = ".") -> str:
        """List the files in a folder of the workspace."""
        names = split_path(path)
        with readable_errors(path), self.open_folder(names) as folder:
            lines: list[str] = []
            _list(folder, prefix="/".join([*names, ""]) if names else "", depth=MAX_DEPTH, lines=lines)
        if not lines:
            return "(empty)"
        if len(lines) > MAX_ENTRIES:
            lines[MAX_ENTRIES:] = [f"(more than {MAX_ENTRIES} entries; list a subfolder)"]
        return "\n".join(lines)

    def read_file(self, path: str, start_line: int = 1, end_line: int | None = None) -> str:
        """Read a text file of the workspace."""
        lines = split_lines(self.read_text(path))
        if not lines:
            return "(empty)"
        if start_line > len(lines):
            raise ToolException(f"{path} has {len(lines)} lines; start_line is {start_line}")
        wanted = len(lines) if end_line is None else min(end_line, len(lines))
        if wanted < start_line:
            raise ToolException(f"end_line is {end_line}, before start_line {start_line}")
        last, length = start_line - 1, 0
        while last < wanted and length + len(lines[last]) <= MAX_RESULT_CHARS:
            length += len(lines[last])
            last += 1
        if last == start_line - 1:
            return f"{lines[last][:MAX_RESULT_CHARS]}\n(line {start_line} is longer than {MAX_RESULT_CHARS} characters)"
        text = "".join(lines[start_line - 1 : last])
        if last == len(lines):
            return text
        return f"{text}(lines {start_line}-{last} of {len(lines)}; read on with start_line {last + 1})"

    def write_file(self, path: str, content: str) -> str:
        """Create a text file in the workspace or replace all of its text."""
        with self._writing:
            num_bytes = self._write(path, content)
        return f"wrote {path} ({num_bytes} bytes)"

    def edit_file(self, path: str, old_text: str, new_text: str) -> str:
        """Replace a piece of text in a file of the workspace."""
        if not old_text:
            raise ToolException("old_text is empty; give the text to replace")
        with self._writing:
            text = self.read_text(path)
            count = _count(text, old_text)
            if count != 1:
                found = "does not occur" if count == 0 else f"occurs {count} times"
                raise ToolException(f"old_text {found} in {path}; it must occur once: copy it exactly, with more lines")
            num_bytes = self._write(path, text.replace(old_text, new_text))
        return f"edited {path} ({num_bytes} bytes)"

    def names(self) -> list[str]:
        """Return the names of what is in the root itself."""
        with readable_errors("."), self.open_folder([]) as folder:
            return sorted(os.listdir(folder))

    def read_text(self, path: str) -> str:
        """Return the whole text of a file."""
        *parents, name = _split_file(path)
        with readable_errors(path), self.open_folder(parents) as folder:
            data = read_bytes(folder, name)
        if len(data) > MAX_FILE_BYTES:
            raise ToolException(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ToolException(f"{path} is not a text file") from error

    def _write(self, path: str, content: str) -> int:
        *parents, name = _split_file(path)
        try:
            data = content.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ToolException("the text is not valid Unicode") from error
        if len(data) > MAX_FILE_BYTES:
            raise ToolException(f"the text has {len(data)} bytes; at most {MAX_FILE_BYTES} are allowed")
        with readable_errors(path), self.open_folder(parents, is_created=True) as folder:
            _replace(folder, name, data)
        return len(data)

    @contextlib.contextmanager
    def open_folder(self, names: list[str], *, is_created: bool = False) -> Iterator[int]:
        """Yield a descriptor of a folder below the root, reached without following any link."""
        descriptor = os.open(self.root, FOLDER_FLAGS)
        try:
            for name in names:
                if is_created:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=descriptor)
                parent, descriptor = descriptor, os.open(name, FOLDER_FLAGS, dir_fd=descriptor)
                os.close(parent)
            yield descriptor
        finally:
            os.close(descriptor)


def split_path(path: str) -> list[str]:
    """Return the components of a path inside the workspace.

    Raises:
        ToolException: The path leads out, is too long, or is one of our own unfinished files.
    """
    pure = PurePosixPath(path.strip())
    if "\0" in path or len(path) > 1000:
        raise ToolException("the path is not valid")
    if pure.is_absolute() or path.strip().startswith("~"):
        raise ToolException(f"{path} is outside the workspace; give a path relative to it, such as notes.txt")
    if ".." in pure.parts:
        raise ToolException(f"{path} is outside the workspace; '..' is not allowed")
    if len(pure.parts) > MAX_PARTS or any(is_draft(part) for part in pure.parts):
        raise ToolException(
            f"the path is not valid; give one with fewer than {MAX_PARTS} folders, such as src/notes.txt"
        )
    return list(pure.parts)


def _split_file(path: str) -> list[str]:
    names = split_path(path)
    if not names:
        raise ToolException(f"{path!r} is not a file; give a file name such as notes.txt")
    return names


@contextlib.contextmanager
def readable_errors(path: str) -> Iterator[None]:
    """Turn errors of the operating system into one line for the model."""
    try:
        yield
    except FileNotFoundError as error:
        raise ToolException(f"{path} does not exist; call list_files to see what does") from error
    except IsADirectoryError as error:
        raise ToolException(f"{path} is a folder, not a file") from error
    except (OSError, UnicodeEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the path is not valid Unicode"
        raise ToolException(f"cannot use {path}: {reason} (links are not followed)") from error


def read_bytes(folder: int, name: str) -> bytes:
    """Return at most one byte more than `MAX_FILE_BYTES` of an ordinary file in an open folder.

    A file with a second name is refused: that name may be outside the workspace.

    Raises:
        ToolException: It is a folder, a device, a pipe, or has more than one name.
        OSError: It cannot be opened.
    """
    _check_ordinary(name, os.stat(name, dir_fd=folder, follow_symlinks=False))  # opening a device may do something
    descriptor = os.open(name, _READ, dir_fd=folder)
    try:
        _check_ordinary(name, os.fstat(descriptor))
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            return stream.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)


def _check_ordinary(name: str, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError
    if not stat.S_ISREG(status.st_mode):
        raise ToolException(f"{name} is not a file (links are not followed)")
    if status.st_nlink > 1:
        raise ToolException(f"{name} has {status.st_nlink} names (hard links), so it may lie outside the workspace too")


def _replace(folder: int, name: str, data: bytes) -> None:
    """Put `data` under `name` in one step; anything but an ordinary file there is refused.

    An old file's permissions are kept, without set-user-id and its like; a new one gets those the process gives.
    """
    mode = None
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise ToolException(f"{name} is a {'folder' if stat.S_ISDIR(status.st_mode) else 'link or device'}")
        mode = status.st_mode & 0o777
    draft = f"{_DRAFT_PREFIX}{secrets.token_hex(8)}"
    descriptor = os.open(draft, _CREATE, 0o666 if mode is None else 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            if mode is not None:
                os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder)
        raise


def split_lines(text: str) -> list[str]:
    """Split a text after each line feed, and after nothing else, so that line numbers are those of other programs."""
    return [f"{line}\n" for line in text.split("\n")[:-1]] + [line for line in [text.rpartition("\n")[2]] if line]


def is_draft(name: str) -> bool:
    """Say whether a name is that of a file which is being written."""
    return name.startswith(_DRAFT_PREFIX)


def shown_name(name: str) -> str:
    """Return a file's name on one line: a control character in it could pass for a line of the listing."""
    text = os.fsencode(name).decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _count(text: str, piece: str) -> int:
    """Count where `piece` occurs; 2 at least where it overlaps itself, as "aa" in "aaa" does."""
    count = text.count(piece)
    return 2 if count == 1 and text.find(piece, text.find(piece) + 1) >= 0 else count


def _list(folder: int, *, prefix: str, depth: int, lines: list[str]) -> None:
    """Append the entries below an open folder in order of name; hidden folders are named, not entered."""
    for name in sorted(os.listdir(folder)):
        if len(lines) > MAX_ENTRIES:
            return
        if is_draft(name):
            continue
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:  # gone since it was listed
            continue
        shown = prefix + shown_name(name)
        if stat.S_ISREG(status.st_mode):
            lines.append(f"{shown} ({status.st_size} bytes)")
        elif not stat.S_ISDIR(status.st_mode):
            lines.append(f"{shown} (not a file)")
        else:
            lines.append(f"{shown}/")
            if depth > 1 and not name.startswith("."):
                _list_below(folder, name, prefix=f"{shown}/", depth=depth - 1, lines=lines)


def _list_below(folder: int, name: str, *, prefix: str, depth: int, lines: list[str]) -> None:
    try:
        descriptor = os.open(name, FOLDER_FLAGS, dir_fd=folder)
    except OSError:  # gone, turned into a link, or not readable: its name is listed all the same
        return
    try:
        _list(descriptor, prefix=prefix, depth=depth, lines=lines)
    finally:
        os.close(descriptor)
