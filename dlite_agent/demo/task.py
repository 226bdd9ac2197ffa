"""The demo's task: its wordings, its workspace, and whether it was done."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from dlite_agent.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Check:
    """One thing the session had to bring about, and whether it did."""

    what: str
    is_met: bool


@dataclass(frozen=True, slots=True)
class DemoTask:
    """A session of user turns over a small workspace.

    Attributes:
        turns: What the person says, turn by turn.
        files: Names and contents of the workspace at the start.
        total: The number to be found.
        kill_after_turn: The process is killed between this turn and the next.
    """

    turns: tuple[str, ...]
    files: dict[str, str]
    total: str
    kill_after_turn: int

    @classmethod
    def load(cls, wording: int) -> DemoTask:
        """Read the task in one of its wordings, counted from 1.

        Raises:
            ConfigError: If there is no such wording.
        """
        stored = json.loads(files("dlite_agent.demo").joinpath("task.json").read_text())
        wordings = stored["wordings"]
        if not 1 <= wording <= len(wordings):
            raise ConfigError(f"wording {wording}; expected 1 to {len(wordings)}")
        return cls(tuple(wordings[wording - 1]), stored["files"], stored["total"], stored["kill_after_turn"])

    def prepare(self, workspace: Path) -> None:
        """Write the files of the workspace."""
        workspace.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (workspace / name).write_text(content)

    def check(self, workspace: Path, state: dict[str, Any]) -> Sequence[Check]:
        """Look at what the session left behind: the file, the plan, the answer."""
        report = workspace / "total.txt"
        text = report.read_text() if report.is_file() else ""
        todos = state.get("todos") or []
        answer = str(state["messages"][-1].content) if state.get("messages") else ""
        return (
            Check(f"total.txt holds {self.total}", self._names_total(text)),
            Check(
                "all steps of the plan are completed",
                len(todos) >= 3 and all(t["status"] == "completed" for t in todos),
            ),
            Check(f"the last answer names {self.total}", self._names_total(answer)),
        )

    def _names_total(self, text: str) -> bool:
        return re.search(rf"(?<![\d.]){re.escape(self.total)}0?(?![\d])", text) is not None
