"""What a person and a script see of a run."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from dlite_agent.agent.events import CallEvent, PlanEvent, ReportEvent, ResultEvent, TextEvent, ToolEvent
from dlite_agent.run import events as run_events
from dlite_agent.run.figures import Figures
from dlite_agent.run.json_view import JsonView
from dlite_agent.run.terminal_view import TerminalView

HOSTILE = "\x1b[2J\x1b]0;title\x07 \x9b31m \r\x08\x7f \u202eright to left [red]:smile: \u00e9"
FIGURES = Figures.of([CallEvent(10, 5, "stop", {"passes": 2, "accepted": {"lookup": 2}, "target_us": 10**6})]).as_json()


def all_events() -> list[Any]:
    """Return an event of each kind, with texts that would like to drive the terminal."""
    return [
        run_events.StartEvent("thread", "/folder", "model", 2, 30, True),
        TextEvent(HOSTILE),
        TextEvent(HOSTILE),
        CallEvent(10, 5, "stop", {}),
        ToolEvent(HOSTILE, {HOSTILE: HOSTILE}),
        ToolEvent(HOSTILE, {"raw": HOSTILE}, is_valid=False),
        ResultEvent(HOSTILE, HOSTILE, is_error=False),
        ReportEvent(HOSTILE, {"what": HOSTILE}),
        PlanEvent([{"content": HOSTILE, "status": HOSTILE, "note": HOSTILE}]),
        run_events.ResumedEvent(20, 10),
        run_events.MessageEvent(HOSTILE),
        run_events.ApprovalEvent("1", HOSTILE, {"a": HOSTILE, "lines": "1\n2"}),
        run_events.TurnEndEvent("stopped", FIGURES),
        run_events.ErrorEvent("Kind", HOSTILE),
        run_events.NoteEvent(HOSTILE),
        run_events.HelpEvent({"/help": "list"}),
        run_events.ToolsEvent([{"name": HOSTILE, "what": HOSTILE, "is_asked": True}]),
        run_events.StatsEvent(FIGURES, FIGURES),
        run_events.SessionsEvent(
            [{"thread": HOSTILE, "num_turns": 1, "num_tokens": 2, "num_bytes": 3, "last_turn_at": None}]
        ),
        run_events.ForkedEvent("new", HOSTILE, 5, 6),
        run_events.UndoneEvent(HOSTILE, 1, "id"),
        run_events.EndEvent("dlite-agent run"),
    ]


def shown(events: list[Any], monkeypatch: pytest.MonkeyPatch, *, term: str = "xterm-256color", **options: Any) -> str:
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("COLORTERM", raising=False)
    out = io.StringIO()
    view = TerminalView(Console(file=out, **options))
    for event in events:
        view.show(event)
    return out.getvalue()


@pytest.mark.parametrize("width", [10, 80])
@pytest.mark.parametrize(("term", "is_terminal"), [("dumb", True), ("xterm-256color", False)])
def test_what_cannot_show_colours_is_sent_none(
    monkeypatch: pytest.MonkeyPatch, term: str, is_terminal: bool, width: int
) -> None:
    out = shown(all_events(), monkeypatch, term=term, force_terminal=is_terminal, width=width)
    assert [char for char in out if not char.isprintable() and char != "\n"] == []
    assert "\\x1b[2J" in out


def test_texts_do_not_drive_a_terminal_that_can_do_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    out = shown(all_events(), monkeypatch, force_terminal=True, width=100)
    ours = re.compile(r"\x1b\[[0-9;]*m")
    assert ours.search(out)
    assert [char for char in ours.sub("", out) if not char.isprintable() and char != "\n"] == []
    monkeypatch.setenv("NO_COLOR", "1")
    colours = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3|4|9|10)[0-9][;m]")
    assert colours.search(out)
    assert not colours.search(shown(all_events(), monkeypatch, force_terminal=True, width=100))


def test_streamed_text_is_printed_as_it_is_and_the_next_line_begins_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ["a [b] ", ":smile:", "\n\n", "  c " * 40]
    out = shown([*map(TextEvent, parts), run_events.NoteEvent("note")], monkeypatch, width=40)
    assert out == "".join(parts) + "\nnote\n"


def test_a_narrow_terminal_gets_every_word_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    out = shown(all_events(), monkeypatch, width=20)
    assert "…" not in out


def test_every_event_is_one_line_of_ascii_json() -> None:
    out = io.StringIO()
    view = JsonView(out)
    for event in all_events():
        view.show(event)
    lines = out.getvalue().splitlines()
    assert out.getvalue().isascii()
    kinds = [json.loads(line)["event"] for line in lines]
    assert len(lines) == len(all_events())
    assert {"start", "text", "call", "tool", "result", "plan", "approval", "turn_end", "error", "end"} <= set(kinds)
    assert json.loads(lines[1])["text"] == HOSTILE


def test_numbers_that_json_lacks_are_text() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    out = io.StringIO()
    JsonView(out).show(ToolEvent("add", {"a": [1e999, {"b": float("nan")}], "c": 0.5}))
    args = json.loads(out.getvalue(), parse_constant=refuse)["args"]
    assert args == {"a": ["inf", {"b": "nan"}], "c": 0.5}


def test_figures_add_up() -> None:
    stats = {"passes": 2, "proposed": 6, "accepted": {"lookup": 2}, "draft_us": 10**5, "target_us": 9 * 10**5}
    reused = {"prefilled": 3, "reused_store": 4, "reused_ram": 5}
    figures = Figures.of([CallEvent(12, 5, "stop", stats | reused), CallEvent(9, 3, "stop", stats)])
    assert (figures.prefilled, figures.restored, figures.reused) == (3, 4, 5)
    assert (figures.drafted, figures.accepted) == (12, {"lookup": 4})
    assert figures.tau == pytest.approx(6 / 4)
    assert figures.tokens_per_second == pytest.approx(3.0)
    assert Figures.of([]).tau == 0.0
