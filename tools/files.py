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

from langchain_core.tools import BaseTool, ToolException
from pydantic import BaseModel, Field

from dlite_agent.errors import ConfigError
from dlite_agent.tools.factory import make_tool

MAX_FILE_BYTES = 1 << 20
MAX_RESULT_CHARS = 16_000
MAX_ENTRIES = 200
MAX_DEPTH = 8

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DRAFT_PREFIX = ".dlite-draft-"


class ListFilesArgs(BaseModel):
    """Arguments of `list_files`."""

    path: str = Field(default=".", description="Folder to list, for example src")


class ReadFileArgs(BaseModel):
    """Arguments of `read_file`."""

    path: str = Field(description="File to read, for example notes.txt")
    start_line: int = Field(default=1, ge=1, description="First line to return")


class WriteFileArgs(BaseModel):
    """Arguments of `write_file`."""

    path: str = Field(description="File to write, for example notes.txt")
    content: str = Field(description="The whole new text of the file")


class EditFileArgs(BaseModel):
    """Arguments of `edit_file`."""

    path: str = Field(description="File to change, for example notes.txt")
    old_text: str = Field(description="Text to replace, exactly as it is in the file; must occur once")
    new_text: str = Field(description="Text to put there")


def file_tools(root: Path) -> list[BaseTool]:
    """Return the tools `list_files`, `read_file`, `write_file` and `edit_file` for one folder.

    Args:
        root: The folder; created where it does not exist.

    Raises:
        ConfigError: `root` cannot be used as a folder.
    """
    workspace = Workspace(root)
    return [
        make_tool(workspace.list_files, ListFilesArgs),
        make_tool(workspace.read_file, ReadFileArgs),
        make_tool(workspace.write_file, WriteFileArgs),
        make_tool(workspace.edit_file, EditFileArgs),
    ]


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
        names = _split(path)
        with _readable_errors(path), self._open_folder(names) as folder:
            lines: list[str] = []
            _list(folder, prefix="/".join([*names, ""]) if names else "", depth=MAX_DEPTH, lines=lines)
        if not lines:
            return "(empty)"
        if len(lines) > MAX_ENTRIES:
            lines[MAX_ENTRIES:] = [f"(more than {MAX_ENTRIES} entries; list a subfolder)"]
        return "\n".join(lines)

    def read_file(self, path: str, start_line: int = 1) -> str:
        """Read a text file of the workspace."""
        lines = self._read(path).splitlines(keepends=True)
        if not lines:
            return "(empty)"
        if start_line > len(lines):
            raise ToolException(f"{path} has {len(lines)} lines; start_line is {start_line}")
        text, last = "", start_line - 1
        while last < len(lines) and len(text) + len(lines[last]) <= MAX_RESULT_CHARS:
            text += lines[last]
            last += 1
        if last == start_line - 1:
            return f"{lines[last][:MAX_RESULT_CHARS]}\n(line {start_line} is longer than {MAX_RESULT_CHARS} characters)"
        if last < len(lines):
            return f"{text}(lines {start_line}-{last} of {len(lines)}; read on with start_line {last + 1})"
        return text

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
            text = self._read(path)
            count = text.count(old_text)
            if count != 1:
                found = "does not occur" if count == 0 else f"occurs {count} times"
                raise ToolException(f"old_text {found} in {path}; it must occur once: copy it exactly, with more lines")
            num_bytes = self._write(path, text.replace(old_text, new_text))
        return f"edited {path} ({num_bytes} bytes)"

    def _read(self, path: str) -> str:
        *parents, name = _split_file(path)
        with _readable_errors(path), self._open_folder(parents) as folder:
            data = _read_bytes(folder, name)
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
        with _readable_errors(path), self._open_folder(parents, is_created=True) as folder:
            _replace(folder, name, data)
        return len(data)

    @contextlib.contextmanager
    def _open_folder(self, names: list[str], *, is_created: bool = False) -> Iterator[int]:
        """Yield a descriptor of a folder below the root, reached without following any link."""
        descriptor = os.open(self.root, _FOLDER)
        try:
            for name in names:
                if is_created:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=descriptor)
                parent, descriptor = descriptor, os.open(name, _FOLDER, dir_fd=descriptor)
                os.close(parent)
            yield descriptor
        finally:
            os.close(descriptor)


def _split(path: str) -> list[str]:
    """Return the components of a path inside the workspace."""
    pure = PurePosixPath(path.strip())
    if "\0" in path or len(path) > 1000:
        raise ToolException("the path is not valid")
    if pure.is_absolute() or path.strip().startswith("~"):
        raise ToolException(f"{path} is outside the workspace; give a path relative to it, such as notes.txt")
    if ".." in pure.parts:
        raise ToolException(f"{path} is outside the workspace; '..' is not allowed")
    return list(pure.parts)


def _split_file(path: str) -> list[str]:
    names = _split(path)
    if not names:
        raise ToolException(f"{path!r} is not a file; give a file name such as notes.txt")
    return names


@contextlib.contextmanager
def _readable_errors(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ToolException(f"{path} does not exist; call list_files to see what does") from error
    except IsADirectoryError as error:
        raise ToolException(f"{path} is a folder, not a file") from error
    except (OSError, UnicodeEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the path is not valid Unicode"
        raise ToolException(f"cannot use {path}: {reason} (links are not followed)") from error


def _read_bytes(folder: int, name: str) -> bytes:
    """Return at most one byte more than `MAX_FILE_BYTES` of an ordinary file."""
    descriptor = os.open(name, _READ, dir_fd=folder)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError
        if not stat.S_ISREG(mode):
            raise ToolException(f"{name} is not a file")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            return stream.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)


def _replace(folder: int, name: str, data: bytes) -> None:
    """Put `data` under `name` in one step; anything but an ordinary file there is refused."""
    mode = 0o644
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise ToolException(f"{name} is a {'folder' if stat.S_ISDIR(status.st_mode) else 'link or device'}")
        mode = stat.S_IMODE(status.st_mode)
    draft = f"{_DRAFT_PREFIX}{secrets.token_hex(8)}"
    descriptor = os.open(draft, _CREATE, mode, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder)
        raise


def _list(folder: int, *, prefix: str, depth: int, lines: list[str]) -> None:
    """Append the entries below an open folder in order of name; hidden folders are named, not entered."""
    for name in sorted(os.listdir(folder)):
        if len(lines) > MAX_ENTRIES:
            return
        if name.startswith(_DRAFT_PREFIX):
            continue
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:  # gone since it was listed
            continue
        shown = prefix + os.fsencode(name).decode("utf-8", errors="replace")
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
        descriptor = os.open(name, _FOLDER, dir_fd=folder)
    except OSError:  # gone, turned into a link, or not readable: its name is listed all the same
        return
    try:
        _list(descriptor, prefix=prefix, depth=depth, lines=lines)
    finally:
        os.close(descriptor)
