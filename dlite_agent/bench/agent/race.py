"""A long session replayed by the same graph over two models: ours, and `generate`, which computes each call anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from pydantic import ConfigDict, Field

from dlite_agent.bench.agent.replay import replay
from dlite_agent.bench.agent.sessions import split_turns
from dlite_agent.bench.contest import Spread
from dlite_agent.chat_model import ChatDLite
from dlite_agent.errors import ConfigError
from dlite_agent.recorded import RecordedSession
from dlite_agent.tool_schemas import format_tools


class StockChatModel(BaseChatModel):
    """A chat model as one writes it over `generate`: each call renders the conversation and computes all of it.

    Attributes:
        model: What `peers.load_stock` loads.
        runtime: Whose prompts it is given, so that both models read the same tokens.
        max_tokens: Upper bound of tokens of a reply.
        num_generated: Tokens of all replies so far.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: Any
    runtime: Any
    max_tokens: int
    num_generated: int = Field(default=0)

    @property
    def _llm_type(self) -> str:
        return "transformers-generate"

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any) -> Runnable[Any, AIMessage]:
        """Show tools to the model."""
        return self.bind(tools=format_tools(tools))

    @torch.inference_mode()
    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        ids = self.runtime.encoder.encode(self.runtime.render(messages, kwargs.get("tools") or []))
        prompt, end = torch.tensor([ids]), sorted(self.runtime.end_ids)
        options = {"eos_token_id": end, "pad_token_id": end[0]} if end else {}
        reply = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self.max_tokens,
            do_sample=False,
            use_cache=True,
            **options,
        )[0, len(ids) :].tolist()
        self.num_generated += len(reply)
        text = self.runtime.encoder.decode([token for token in reply if token not in self.runtime.end_ids])
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])


@dataclass(frozen=True, slots=True)
class RaceReport:
    """What a race gave.

    Attributes:
        session: The session.
        calls: Model calls of each replay.
        ratio: Our seconds over the stock model's, round by round.
        ours_s: Our seconds.
        stock_s: The stock model's.
    """

    session: str
    calls: int
    ratio: Spread
    ours_s: Spread
    stock_s: Spread


def long_session(sessions: Sequence[RecordedSession], chat: ChatDLite, *, calls: int, room: int) -> RecordedSession:
    """Return the session with the fewest tokens of those that have so many calls, or else the one with most calls.

    Args:
        sessions: To choose from.
        chat: Whose tokens count.
        calls: Model calls wanted.
        room: Most tokens of its last prompt.

    Raises:
        ConfigError: If none has room.
    """
    counted = [(session, num_calls(session, calls)) for session in sessions]
    most = max(count for _, count in counted)
    lengths: list[tuple[int, int, RecordedSession]] = []
    for index, (session, count) in enumerate(counted):
        if count == most or count >= calls:
            text = chat.runtime.render(session.messages, list(session.tools))
            lengths.append((len(chat.runtime.encoder.encode(text)), index, session))
    length, _, shortest = min(lengths, key=lambda each: each[:2])
    if length > room:
        raise ConfigError(f"the shortest long session has {length} tokens; the model has room for {room}: take another")
    return shortest


def num_calls(session: RecordedSession, at_most: int) -> int:
    """Return the model calls of a replay that ends after so many."""
    return sum(len(turn.replies) for turn in split_turns(session, max_calls=at_most))


def race(
    session: RecordedSession,
    ours: ChatDLite,
    stock: StockChatModel,
    *,
    calls: int,
    num_rounds: int,
    say: Callable[[str], None],
) -> RaceReport:
    """Replay the session by both, one after the other, again and again; tools take no time, and do not count."""
    seconds: dict[str, list[float]] = {"ours": [], "stock": []}
    for number in range(num_rounds):
        sides: list[tuple[str, BaseChatModel]] = [("ours", ours), ("stock", stock)]
        for name, model in sides if number % 2 == 0 else sides[::-1]:
            start = time.perf_counter()
            asyncio.run(replay(session, model, thread_id=f"race {number}", max_calls=calls))
            seconds[name].append(time.perf_counter() - start)
            say(f"{session.id}, round {number + 1}: {name} {seconds[name][-1]:.1f} s")
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["stock"], strict=True)]
    return RaceReport(
        session.id,
        num_calls(session, calls),
        Spread.of(ratios),
        Spread.of(seconds["ours"]),
        Spread.of(seconds["stock"]),
    )
