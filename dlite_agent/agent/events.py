"""One turn of an agent as a stream of small events, for terminals, scripts and the demo alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langgraph.runtime import RunControl
from langgraph.types import Command

from dlite_agent.agent.reports import REPORT_KEY
from dlite_agent.agent.shaping import plain_text
from dlite_agent.prompting.messages import METADATA_KEY


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A piece of the model's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolEvent:
    """A tool call the model made."""

    name: str
    args: dict[str, Any]
    is_valid: bool = True


@dataclass(frozen=True, slots=True)
class ResultEvent:
    """What a tool answered."""

    name: str
    text: str
    is_error: bool


@dataclass(frozen=True, slots=True)
class PlanEvent:
    """The plan as it is now: items with `content` and `status`."""

    todos: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class CallEvent:
    """Figures of one model call; `stats` are those of `response_metadata["dlite"]["stats"]`."""

    input_tokens: int
    output_tokens: int
    finish_reason: str
    stats: dict[str, Any]

    @property
    def tau(self) -> float:
        """Tokens per target pass, the prefill's token not counted (1.0 is plain decoding)."""
        passes = self.stats.get("passes", 0)
        return (self.output_tokens - 1) / passes if passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second, prefill apart."""
        seconds = (self.stats.get("draft_us", 0) + self.stats.get("target_us", 0)) / 1e6
        return (self.output_tokens - 1) / seconds if seconds else 0.0


@dataclass(frozen=True, slots=True)
class ReportEvent:
    """What a middleware reports (`dlite_agent.agent.reports`): its kind and its fields."""

    kind: str
    fields: dict[str, Any]


AgentEvent = TextEvent | ToolEvent | ResultEvent | PlanEvent | CallEvent | ReportEvent

_KINDS = {
    "text": TextEvent,
    "tool": ToolEvent,
    "result": ResultEvent,
    "plan": PlanEvent,
    "call": CallEvent,
    "report": ReportEvent,
}


Given = str | Command[Any] | None
"""What a turn begins with: what the person says, or a decision that it waits for; None goes on where it stopped."""


def run_turn(
    graph: Any, given: Given, config: dict[str, Any], *, control: RunControl | None = None
) -> Iterator[AgentEvent]:
    """Run one turn of a compiled agent graph.

    Args:
        graph: From `create_dlite_agent` or `create_agent`.
        given: What it begins with.
        config: LangGraph config with a `thread_id`.
        control: Ends the turn after the step that it is in, with LangGraph's `GraphDrained`.
    """
    plan: list[dict[str, str]] | None = None
    for event in _events(graph, given, config, control):
        if isinstance(event, PlanEvent):
            if event.todos == plan:
                continue  # the update and its report say the same
            plan = event.todos
        yield event


def _events(graph: Any, given: Given, config: dict[str, Any], control: RunControl | None) -> Iterator[AgentEvent]:
    entered = {"messages": [HumanMessage(given)]} if isinstance(given, str) else given
    seen = {message.id for message in graph.get_state(config).values.get("messages", ())}
    streamed: set[str | None] = set()
    modes = ["messages", "updates", "custom"]
    for mode, payload in graph.stream(entered, config, stream_mode=modes, control=control):
        if mode == "messages":
            message = payload[0]
            if isinstance(message, AIMessageChunk) and isinstance(message.content, str) and message.content:
                streamed.add(message.id)
                yield TextEvent(message.content)
            continue
        if mode == "custom":
            if isinstance(payload, dict) and REPORT_KEY in payload:
                yield _report_event(payload)
            continue
        for update in payload.values():
            yield from _update_events(update, seen, streamed)


def as_json(event: AgentEvent) -> dict[str, Any]:
    """Return an event as a JSON object with its kind in `event`."""
    return {"event": type(event).__name__.removesuffix("Event").lower(), **asdict(event)}


def from_json(fields: dict[str, Any]) -> AgentEvent | None:
    """Return the event of an object that `as_json` made, or None if it is of another kind."""
    kind: Any = _KINDS.get(fields["event"])
    return None if kind is None else kind(**{name: value for name, value in fields.items() if name != "event"})


def _update_events(update: Any, seen: set[str | None], streamed: set[str | None]) -> Iterator[AgentEvent]:
    """Yield what is new; a middleware that rewrites history sends all of it again.

    Text that was not streamed is a middleware's, which ended the turn in the model's place, or a model's that cannot.
    """
    if not isinstance(update, dict):
        return
    for message in update.get("messages") or ():
        if message.id is not None and message.id in seen:
            continue
        seen.add(message.id)
        if isinstance(message, AIMessage):
            if message.text and message.id not in streamed:
                yield TextEvent(message.text)
            yield from _reply_events(message)
        elif isinstance(message, ToolMessage):
            text = plain_text(message.content)  # None: there are images and the like in it
            is_error = message.status == "error"
            yield ResultEvent(message.name or "", str(message.content) if text is None else text, is_error)
    if isinstance(update.get("todos"), list) and update["todos"]:
        yield PlanEvent([dict(todo) for todo in update["todos"]])


def _report_event(payload: dict[str, Any]) -> AgentEvent:
    if payload[REPORT_KEY] == "plan":
        return PlanEvent(payload["todos"])
    return ReportEvent(payload[REPORT_KEY], {key: payload[key] for key in payload if key != REPORT_KEY})


def call_event(message: BaseMessage) -> CallEvent | None:
    """Return the figures of the call that made a message, or None if it has none."""
    usage = message.usage_metadata if isinstance(message, AIMessage) else None
    if usage is None:
        return None
    record = message.response_metadata.get(METADATA_KEY) or {}
    return CallEvent(
        usage["input_tokens"],
        usage["output_tokens"],
        str(message.response_metadata.get("finish_reason", "")),
        dict(record.get("stats") or {}),
    )


def _reply_events(message: AIMessage) -> Iterator[AgentEvent]:
    call_figures = call_event(message)
    if call_figures is not None:
        yield call_figures
    for call in message.tool_calls:
        yield ToolEvent(call["name"], call["args"])
    for invalid in message.invalid_tool_calls:
        yield ToolEvent(invalid["name"] or "", {"raw": invalid["args"]}, is_valid=False)
