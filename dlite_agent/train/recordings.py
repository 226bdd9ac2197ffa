"""The prompts a drafter is trained on: recorded agent sessions, open questions, documents with questions.

A recorded assistant message is only ever context. Where a conversation goes on without one (open questions with a
second turn), the target's own reply takes its place.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage

from dlite_agent.recorded import RecordedSession, read_records, read_sessions
from dlite_agent.train.split import held_out_groups, read_groups, read_listed_ids

_BLOCK = 8

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One place where the assistant speaks.

    Attributes:
        messages: The conversation before it; a None stands for the target's own reply to all that comes before.
        tools: OpenAI-style tool dicts offered there.
    """

    messages: tuple[AnyMessage | None, ...]
    tools: Tools = ()


@dataclass(frozen=True, slots=True)
class TrainingSession:
    """A conversation to answer turn by turn.

    Attributes:
        id: Its name.
        group: The task it is a variant of.
        turns: In order; each prompt usually continues the one before.
    """

    id: str
    group: str
    turns: tuple[Turn, ...]

    @property
    def prefix_key(self) -> str:
        """Names what the first prompt begins with, as far as it is known to be shared: the tools offered."""
        tools = [tool["function"]["name"] for tool in self.turns[0].tools] if self.turns else []
        return hashlib.blake2b("|".join(tools).encode(), digest_size=8).hexdigest()


def training_sessions(workloads: Path, *, is_held_out: bool = False, seed: int = 0) -> list[TrainingSession]:
    """Read the sessions of one side of the split, in the order in which to answer them.

    The order is random in blocks of sessions that share their tools, so that any part of it is a fair sample and
    neighbours share the beginning of their prompts.

    Args:
        workloads: Folder of `agent/`, `general/`, `long_context/`, `subsets.json`.
        is_held_out: Whether to take the held-out sessions or the others.
        seed: Of the order.

    Raises:
        ConfigError: If the workloads cannot be read.
    """
    groups = read_groups(workloads)
    held_out = held_out_groups(groups, read_listed_ids(workloads))
    every = [*_agent(workloads, groups), *_general(workloads), *_long_context(workloads)]
    chosen = [session for session in every if session.turns and (session.group in held_out) == is_held_out]
    return _ordered(chosen, random.Random(seed))


def _ordered(sessions: Sequence[TrainingSession], order: random.Random) -> list[TrainingSession]:
    alike: dict[str, list[TrainingSession]] = {}
    for session in sessions:
        alike.setdefault(session.prefix_key, []).append(session)
    blocks = []
    for members in alike.values():
        order.shuffle(members)
        blocks += [members[start : start + _BLOCK] for start in range(0, len(members), _BLOCK)]
    order.shuffle(blocks)
    return [session for block in blocks for session in block]


def _agent(workloads: Path, groups: Mapping[str, str]) -> Iterator[TrainingSession]:
    for recorded in read_sessions(workloads):
        yield TrainingSession(recorded.id, groups[recorded.id], tuple(_recorded_turns(recorded)))


def _recorded_turns(recorded: RecordedSession) -> Iterator[Turn]:
    for index, message in enumerate(recorded.messages):
        if isinstance(message, AIMessage) and index > 0:
            yield Turn(recorded.messages[:index], recorded.tools_at(index))


def _general(workloads: Path) -> Iterator[TrainingSession]:
    for file in sorted(workloads.glob("general/*.jsonl")):
        for record in read_records(file):
            messages: list[AnyMessage | None] = []
            turns = []
            for text in record["turns"]:
                messages.append(HumanMessage(text))
                turns.append(Turn(tuple(messages)))
                messages.append(None)
            yield TrainingSession(record["id"], record["id"], tuple(turns))


def _long_context(workloads: Path) -> Iterator[TrainingSession]:
    """Each question is asked on its own behind the same document."""
    for file in sorted(workloads.glob("long_context/*.jsonl")):
        for record in read_records(file):
            about: dict[str, Any] = dict(record)
            head = f"{about['instruction']}\n\n{about['document']}"
            questions = [f"{head}\n\n{query['question']}" for query in about["queries"]]
            turns = tuple(Turn((HumanMessage(text),)) for text in questions)
            yield TrainingSession(record["id"], record["id"], turns)
