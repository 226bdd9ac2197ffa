"""Which session a turn belongs to, and that it is stored when the turn is over."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, NotRequired, TypedDict

from langchain.agents.middleware import AgentMiddleware, ExtendedModelResponse
from langchain.agents.middleware.types import AgentState, ModelRequest, ModelResponse, OmitFromInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import ensure_config
from langgraph.types import Command

from dlite_agent.agent.reports import report
from dlite_agent.agent.turns import is_said, rounds_of_turn
from dlite_agent.chat_model import ChatDLite
from dlite_agent.prompting.messages import METADATA_KEY


class SessionStamp(TypedDict):
    """Where a conversation stands.

    Attributes:
        thread_id: The thread, or None if the graph was called without one.
        line: Name of this line of the thread: all human messages on it, one after the other, decide it, so that forks
            of a thread have different ones.
        turn: Id of the newest human message.
        session: Name of the model's session, or None if it is not kept.
        snapshot: Its newest snapshot, which `dlite-agent sessions fork` starts from; None if it is not stored.
    """

    thread_id: str | None
    line: str
    turn: str
    session: str | None
    snapshot: str | None


class SessionState(AgentState[Any]):
    """Graph state with the stamp of the last call."""

    session: NotRequired[Annotated[SessionStamp, OmitFromInput]]


class SessionMiddleware(AgentMiddleware[Any, Any, Any]):
    """Stamps the state with thread, line and snapshot, pins the session's rows until the turn is over, and stores it.

    A turn that calls tools comes back: until its end its rows are dropped from RAM after those of all other sessions.
    With `Settings(durability="async")` replies and tools do not wait for commits; the end of a turn does, so that what
    was handed out outlives its process. A turn without a thread is a report "no_thread": its rows are not kept.
    """

    state_schema = SessionState

    def __init__(self, model: ChatDLite) -> None:
        """Set the model whose sessions these are."""
        super().__init__()
        self.model = model

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ExtendedModelResponse[Any]:
        """Call the model and stamp the state."""
        return self._stamped(request, handler(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ExtendedModelResponse[Any]:
        """Do the same asynchronously."""
        return self._stamped(request, await handler(request))

    def after_agent(self, state: Any, runtime: Any) -> None:
        """Unpin the session, and wait for commits in the background."""
        self._finish(state)

    async def aafter_agent(self, state: Any, runtime: Any) -> None:
        """Do the same without holding the event loop up."""
        await asyncio.to_thread(self._finish, state)

    def _finish(self, state: Any) -> None:
        keeper, stamp = self.model.runtime.keeper, state.get("session")
        if stamp is not None and stamp["session"] is not None:
            keeper.unpin(stamp["session"])
        keeper.flush()

    def _stamped(self, request: ModelRequest[Any], response: ModelResponse[Any]) -> ExtendedModelResponse[Any]:
        stamp = _stamp(request, response)
        if stamp["session"] is not None:
            self.model.runtime.keeper.pin(stamp["session"])
        return ExtendedModelResponse(response, Command(update={"session": stamp}))


def _stamp(request: ModelRequest[Any], response: ModelResponse[Any]) -> SessionStamp:
    thread_id = (ensure_config().get("configurable") or {}).get("thread_id")
    if thread_id is None and not rounds_of_turn(request.messages):
        report(
            request.runtime, "no_thread", advice="call the graph with a thread_id, so that the next turn reuses this"
        )
    before: Any = request.state.get("session")
    turn = _newest_turn(request.messages)
    record = _record(response.result)
    return SessionStamp(
        thread_id=thread_id,
        line=_line(before, turn),
        turn=turn,
        session=record.get("session"),
        snapshot=record.get("snapshot"),
    )


def _newest_turn(messages: Sequence[BaseMessage]) -> str:
    human = (m.id for m in reversed(messages) if is_said(m))
    return str(next(human, None))


def _line(before: SessionStamp | None, turn: str) -> str:
    if before is not None and before["turn"] == turn:
        return before["line"]
    text = f"{'' if before is None else before['line']} {turn}"
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _record(messages: Sequence[BaseMessage]) -> Mapping[str, Any]:
    reply = next((message for message in messages if isinstance(message, AIMessage)), None)
    record = None if reply is None else reply.response_metadata.get(METADATA_KEY)
    return record if isinstance(record, Mapping) else {}
