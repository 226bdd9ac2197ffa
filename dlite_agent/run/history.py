"""A thread as LangGraph's checkpoints have it: closing what was cut, going back, going on under another name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.serde.types import RESUME
from langgraph.types import StateUpdate

from dlite_agent.agent.turns import closing_message, is_said, is_turn_over, rounds_of_turn
from dlite_agent.errors import ConfigError, SessionExistsError, UnknownSessionError
from dlite_agent.run.approval import open_question
from dlite_agent.run.events import ApprovalEvent, ForkedEvent, UndoneEvent
from dlite_agent.run.thread_lock import ThreadLock
from dlite_agent.sessions.creating import fork_session
from dlite_agent.sessions.keys import SessionName
from dlite_agent.sessions.saver import RedisSaver
from dlite_agent.sessions.store import SessionStore

MODEL_NODE = "model"
"""The node in which LangChain's agents call their model; a thread's session is named after it."""

_CLEAR = StateUpdate(None, "__end__")  # keeps what finished tasks wrote, and ends all others
_ANSWERED = "dlite-answered"  # in the place of a task's id: no task reads it
_NAME_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Cut:
    """Why a turn did not end by itself: in the model's last word, and as the result of its open calls."""

    reason: str
    result: str


STOPPED = Cut("the person stopped the turn", "Error: this call was not run: the person stopped the turn.")
BROKEN = Cut("the turn was cut short", "Error: the turn was cut short in this call; it may have been run, or not.")


def check_thread_name(name: str) -> str:
    """Return a thread's name if people and terminals can handle it.

    Raises:
        ConfigError: If it is empty, too long or holds characters that cannot be printed.
    """
    if not name.strip() or not name.isprintable() or len(name) > _NAME_CHARACTERS:
        raise ConfigError(f"the thread is named {name[:80]!r}; expected 1 to {_NAME_CHARACTERS} printable characters")
    return name


def missing_end(messages: Sequence[BaseMessage], cut: Cut) -> list[BaseMessage]:
    """Return what a conversation lacks before the person can speak again: results of open calls, and a last word."""
    if is_turn_over(messages):
        return []
    rounds = rounds_of_turn(messages)
    open_calls = [call for turn_round in rounds for call in (*turn_round.open_calls, *turn_round.open_invalid_calls)]
    results = [
        ToolMessage(cut.result, tool_call_id=call["id"] or "", name=call["name"] or "unknown", status="error")
        for call in open_calls
    ]
    return [*results, closing_message(cut.reason, kind="stopped")]


@dataclass(slots=True)
class History:
    """The thread a conversation is on.

    Attributes:
        graph: The agent, compiled with `saver`.
        saver: Keeps its checkpoints.
        store: Keeps its sessions, or None.
        thread_id: The thread; `fork` moves on to another.
        lock: Keeps other runs off the thread, or None.
    """

    graph: Any
    saver: RedisSaver
    store: SessionStore | None
    thread_id: str
    lock: ThreadLock | None = None

    @property
    def config(self) -> dict[str, Any]:
        """LangGraph's config of the thread."""
        return {"configurable": {"thread_id": self.thread_id}, "recursion_limit": 100}

    @property
    def state(self) -> Any:
        """The newest state, a `StateSnapshot`."""
        return self.graph.get_state(self.config)

    @property
    def messages(self) -> list[BaseMessage]:
        """The conversation."""
        return list(self.state.values.get("messages") or ())

    @property
    def plan(self) -> list[dict[str, str]]:
        """The plan, empty if there is none."""
        return [dict(todo) for todo in self.state.values.get("todos") or ()]

    @property
    def question(self) -> ApprovalEvent | None:
        """The call that waits for a decision, or None."""
        saved = self._saved()
        writes = () if saved is None else saved.pending_writes or ()
        answered = (value for task_id, channel, value in writes if (task_id, channel) == (_ANSWERED, RESUME))
        return open_question(self.state.tasks, next(answered, None))

    def mark_answered(self, question_id: str | None) -> None:
        """Note, before it runs, that a call was approved; None if it was not after all.

        LangGraph stores an answer with the result only, so a process that dies in the call would leave the question.
        """
        saved = self._saved()
        assert saved is not None
        self.saver.put_writes(saved.config, [(RESUME, question_id)], _ANSWERED)

    def _saved(self) -> CheckpointTuple | None:
        return self.saver.get_tuple({"configurable": {"thread_id": self.thread_id, "checkpoint_ns": ""}})

    def stored_rows(self) -> int:
        """Return how many tokens' rows the session store should have."""
        stamp = self.state.values.get("session") or {}
        if self.store is None or not stamp.get("snapshot"):
            return 0
        snapshot = self.store.get_snapshot(stamp["session"], stamp["snapshot"])
        return 0 if snapshot is None else snapshot.num_kv

    def mend(self, cut: Cut) -> None:
        """Close a turn that did not end, if there is one; results that tools had given stay."""
        if not missing_end(self.messages, cut):
            return
        self.graph.bulk_update_state(self.config, [[_CLEAR]])
        missing = missing_end(self.messages, cut)
        self.graph.bulk_update_state(self.config, [[StateUpdate({"messages": missing}, MODEL_NODE)], [_CLEAR]])

    def is_unanswered(self) -> bool:
        """Say whether the person has the last word."""
        messages = self.messages
        return bool(messages) and isinstance(messages[-1], HumanMessage)

    def undo(self) -> UndoneEvent:
        """Go back to before the person's last message; the way that is left stays in the checkpoints.

        Raises:
            ConfigError: If there is no such message.
        """
        state = self.state
        said = [message for message in state.values.get("messages") or () if is_said(message)]
        if not said:
            raise ConfigError("there is nothing to undo: the thread holds no message of yours")
        self._go_to(self._before(state, str(said[-1].id)))
        return UndoneEvent(said[-1].text, len(said) - 1, state.config["configurable"]["checkpoint_id"])

    def fork(self, name: str | None = None, checkpoint: str | None = None) -> ForkedEvent:
        """Go on in a new thread with the same history; rows in the session store are shared, not copied.

        Args:
            name: Of the new thread; None for the first free one of this thread's name with a number.
            checkpoint: A checkpoint of this thread to start at; None for where it is.

        Raises:
            ConfigError: If the name cannot be used.
            SessionExistsError: If there is such a thread.
            ThreadInUseError: If another run is about to begin it.
            UnknownSessionError: If there is no such checkpoint.
        """
        target = self._free_name() if name is None else check_thread_name(name)
        if self._exists(target):
            raise SessionExistsError(f"thread {target!r} exists; choose another name")
        at = self._at(checkpoint)
        with nullcontext() if self.lock is None else self.lock.moving_to(target):
            shared = self._fork_session(target, at.values.get("session") or {})
            self.saver.copy_thread(self.thread_id, target)
        origin, self.thread_id = self.thread_id, target
        if checkpoint is not None:
            self._go_to(self._at(checkpoint))
        return ForkedEvent(target, origin, *shared)

    def _fork_session(self, target: str, stamp: Any) -> tuple[int, int]:
        """Make the fork's session in the store; return its tokens and records, which are none if nothing is stored."""
        if self.store is None or not stamp.get("snapshot"):
            return 0, 0
        name = SessionName(target, MODEL_NODE)
        try:
            made = fork_session(self.store, stamp["session"], name, snapshot_id=stamp["snapshot"])
        except UnknownSessionError:  # expired: the fork's first turn computes all of it again
            return 0, 0
        return made.num_tokens, made.num_records - made.num_missing

    def _at(self, checkpoint: str | None) -> Any:
        if checkpoint is None:
            return self.state
        configurable = {"thread_id": self.thread_id, "checkpoint_id": checkpoint}
        if self.saver.get_tuple({"configurable": {**configurable, "checkpoint_ns": ""}}) is None:
            raise UnknownSessionError(f"the thread has no checkpoint {checkpoint[:80]!r}; /undo says which it leaves")
        return self.graph.get_state({"configurable": configurable})

    def _before(self, state: Any, message_id: str) -> Any:
        """Return the newest ancestor without a message, where no turn is running; the oldest one if there is none."""
        at, wanted = state, state.parent_config
        for found in self.graph.get_state_history(self.config):
            if wanted is None:
                break
            if _checkpoint(found.config) != _checkpoint(wanted):
                continue  # of another branch
            at, wanted = found, found.parent_config
            ids = {message.id for message in found.values.get("messages") or ()}
            if message_id not in ids and found.metadata["source"] != "input":
                break
        return at

    def _go_to(self, state: Any) -> None:
        """Make a copy of an earlier state the newest one."""
        self.graph.update_state(state.config, None, as_node="__copy__")
        if state.next:
            self.graph.bulk_update_state(self.config, [[_CLEAR]])

    def _exists(self, name: str) -> bool:
        return self.saver.get_tuple({"configurable": {"thread_id": name, "checkpoint_ns": ""}}) is not None

    def _free_name(self) -> str:
        number = 2
        while self._exists(f"{self.thread_id}-{number}"):
            number += 1
        return check_thread_name(f"{self.thread_id}-{number}")


def _checkpoint(config: Any) -> str:
    return str(config["configurable"]["checkpoint_id"])
