"""Finding files of a workspace by name and by what is in them.

Folders are walked as `dlite_agent.tools.files` does, by descriptor and without following a link. A regular expression
is matched in a confined process: one with nested repeats can take years, and cannot be stopped in a thread.
"""

from __future__ import annotations

import fnmatch
import json
import os
import stat
from collections.abc import Iterator

from langchain_core.tools import ToolException

from dlite_agent.tools.files import (
    FOLDER_FLAGS,
    MAX_FILE_BYTES,
    Workspace,
    is_draft,
    read_bytes,
    readable_errors,
    shown_name,
    split_path,
)
from dlite_agent.tools.process import Limits, run_worker

MAX_FOUND = 100
MAX_VISITED = 20_000
MAX_WALK_DEPTH = 32
MAX_SEARCH_BYTES = 16 << 20
MAX_PATTERN_CHARS = 200
MAX_LINE_CHARS = 200
REGEX_LIMITS = Limits(seconds=3, cpu_seconds=2)


class FileSearch:
    """Searches one workspace; raises ToolException with one line for the model."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def find_files(self, pattern: str) -> str:
        """Find files of the workspace by name."""
        parts = split_path(pattern)
        if not parts or len(pattern) > MAX_PATTERN_CHARS:
            raise ToolException("give a pattern such as *.py, of at most 200 characters")
        if len(parts) == 1:
            parts = ["**", *parts]
        found = [_shown(names) for names in self._walk([]) if _matches(names, parts)]
        if not found:
            return f"no file matches {pattern}"
        if len(found) > MAX_FOUND:
            found[MAX_FOUND:] = [f"(first {MAX_FOUND} of {len(found)} files; use a narrower pattern, such as src/*.py)"]
        return "\n".join(found)

    def search_files(self, text: str, path: str = ".", is_regex: bool = False) -> str:
        """Find the lines of workspace files that hold a text."""
        if not text.strip() or len(text) > MAX_PATTERN_CHARS or "\n" in text:
            raise ToolException(f"give a text of 1 to {MAX_PATTERN_CHARS} characters on one line")
        files, notes = self._texts(path)
        if is_regex:
            arguments = {"pattern": text, "files": files, "max_found": MAX_FOUND + 1, "max_chars": MAX_LINE_CHARS}
            found = json.loads(run_worker("search_worker", arguments, limits=REGEX_LIMITS))
        else:
            found = list(_lines_with(text, files))
        if len(found) > MAX_FOUND:
            found[MAX_FOUND:] = [f"(first {MAX_FOUND} lines; search a subfolder, or a longer text)"]
        return "\n".join([*(found or [f"no line has {text!r}"]), *notes])

    def _texts(self, path: str) -> tuple[list[tuple[str, str]], list[str]]:
        """Return paths and texts of one file or of those below a folder, and what to say about files left out."""
        start = split_path(path)
        try:
            with self._workspace.open_folder(start):
                pass
        except (NotADirectoryError, FileNotFoundError):
            return [(_shown(start), self._workspace.read_text(path))], []
        except (OSError, UnicodeEncodeError):
            with readable_errors(path):
                raise
        texts: list[tuple[str, str]] = []
        left, num_skipped = MAX_SEARCH_BYTES, 0
        for names in self._walk(start):
            data = self._read(names)
            if data is None:
                num_skipped += 1
                continue
            left -= len(data)
            if left < 0:
                return texts, [f"(searched the first {MAX_SEARCH_BYTES} bytes only; search a subfolder)"]
            texts.append((_shown(names), data.decode("utf-8", errors="replace")))
        return texts, [f"({num_skipped} files are not text, too large or links)"] if num_skipped else []

    def _read(self, names: list[str]) -> bytes | None:
        """Return a file's bytes; None for what is too large, not text, gone, or not an ordinary file."""
        try:
            with self._workspace.open_folder(names[:-1]) as folder:
                data = read_bytes(folder, names[-1])
        except (OSError, ToolException):
            return None
        return data if len(data) <= MAX_FILE_BYTES and b"\0" not in data else None

    def _walk(self, start: list[str]) -> Iterator[list[str]]:
        """Yield the paths of the files below a folder in order of name; hidden folders are left out."""
        with readable_errors("/".join(start) or "."), self._workspace.open_folder(start) as folder:
            yield from _walk(folder, start, [MAX_VISITED])


def _walk(folder: int, parents: list[str], left: list[int]) -> Iterator[list[str]]:
    for name in sorted(os.listdir(folder)):
        left[0] -= 1
        if left[0] < 0:
            return
        names = [*parents, name]
        try:
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if stat.S_ISREG(mode) and not is_draft(name):
                yield names
            if not stat.S_ISDIR(mode) or name.startswith(".") or len(names) >= MAX_WALK_DEPTH:
                continue
            descriptor = os.open(name, FOLDER_FLAGS, dir_fd=folder)
        except OSError:  # gone, turned into a link, or not readable
            continue
        try:
            yield from _walk(descriptor, names, left)
        finally:
            os.close(descriptor)


def _matches(names: list[str], parts: list[str]) -> bool:
    """Match a path with a pattern by component, ** standing for any number of folders, in time names x parts."""
    reached = {0}  # how many parts may be used up
    for part in parts:
        if part == "**":
            reached = set(range(min(reached), len(names) + 1)) if reached else reached
        else:
            reached = {at + 1 for at in reached if at < len(names) and fnmatch.fnmatchcase(names[at], part)}
    return len(names) in reached


def _lines_with(text: str, files: list[tuple[str, str]]) -> Iterator[str]:
    num_found = 0
    for path, content in files:
        if text not in content:
            continue
        for number, line in enumerate(content.split("\n"), start=1):
            at = line.find(text)
            if at < 0:
                continue
            first = max(0, at - MAX_LINE_CHARS // 2) if len(line) > MAX_LINE_CHARS else 0
            yield f"{path}:{number}: {line[first : first + MAX_LINE_CHARS].strip()}"
            num_found += 1
            if num_found > MAX_FOUND:
                return


def _shown(names: list[str]) -> str:
    return "/".join(map(shown_name, names))
