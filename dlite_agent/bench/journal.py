"""Finished pieces of a long benchmark, one JSON line each, so that an interrupted one goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Journal:
    """A file of reports of one configuration.

    Lines of another configuration, and what a killed process left half written, count as not there.
    """

    def __init__(self, path: Path | None, configuration: Mapping[str, Any]) -> None:
        """Keep reports in a file, or nowhere."""
        self._path = path
        self._configuration = json.loads(json.dumps(dict(configuration)))  # lists for tuples, as in the file

    def reports(self) -> Iterator[dict[str, Any]]:
        """Yield the reports of this configuration, the oldest first."""
        if self._path is None or not self._path.exists():
            return
        for line in self._path.read_text().splitlines():
            try:
                entry = json.loads(line)
                if entry["configuration"] == self._configuration:
                    yield dict(entry["report"])
            except (ValueError, LookupError, TypeError):
                continue

    def add(self, report: Mapping[str, Any]) -> None:
        """Append a report."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"configuration": self._configuration, "report": dict(report)})
        with self._path.open("a+b") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - 1))
            is_cut = file.read(1) not in (b"", b"\n")
            file.write((("\n" if is_cut else "") + line + "\n").encode())
