"""What several model calls cost together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from langchain_core.messages import BaseMessage

from dlite_agent.agent.events import CallEvent, call_event
from dlite_agent.agent.turns import is_said

_SUMS = ("prefilled", "reused_store", "reused_ram", "proposed", "passes", "prefill_us", "draft_us", "target_us")


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over model calls; those of other models than `ChatDLite` have tokens only.

    Attributes:
        num_calls: Model calls.
        prompt_tokens: Tokens of their prompts.
        prefilled: Prompt tokens that were computed.
        restored: Prompt tokens whose rows came from the session store.
        reused: Prompt tokens whose rows were in RAM.
        generated: Tokens of the replies.
        drafted: Tokens that were proposed to the target.
        accepted: Those it agreed with, by where they came from.
        passes: Passes of the target, prefill apart.
        prefill_s: Seconds of prefill.
        decode_s: Seconds of drafting and verifying.
    """

    num_calls: int = 0
    prompt_tokens: int = 0
    prefilled: int = 0
    restored: int = 0
    reused: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: dict[str, int] = field(default_factory=dict)
    passes: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @classmethod
    def of(cls, calls: Sequence[CallEvent]) -> Figures:
        """Add calls up."""
        sums = {name: sum(call.stats.get(name, 0) for call in calls) for name in _SUMS}
        accepted: Counter[str] = Counter()
        for call in calls:
            accepted.update(call.stats.get("accepted", {}))
        return cls(
            num_calls=len(calls),
            prompt_tokens=sum(call.input_tokens for call in calls),
            prefilled=sums["prefilled"],
            restored=sums["reused_store"],
            reused=sums["reused_ram"],
            generated=sum(call.output_tokens for call in calls),
            drafted=sums["proposed"],
            accepted=dict(sorted(accepted.items())),
            passes=sums["passes"],
            prefill_s=sums["prefill_us"] / 1e6,
            decode_s=(sums["draft_us"] + sums["target_us"]) / 1e6,
        )

    @classmethod
    def of_messages(cls, messages: Iterable[BaseMessage]) -> Figures:
        """Add up the calls that made these messages, in whatever process."""
        return cls.of([call for message in messages if (call := call_event(message)) is not None])

    @property
    def tau(self) -> float:
        """Tokens per target pass, the token of each prefill not counted; 0 where nothing is known."""
        return (self.generated - self.num_calls) / self.passes if self.passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second, prefill apart; 0 where nothing is known."""
        return (self.generated - self.num_calls) / self.decode_s if self.decode_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return all of it as a JSON object."""
        return {**asdict(self), "tau": round(self.tau, 3), "tokens_per_second": round(self.tokens_per_second, 2)}


def last_turn(messages: Sequence[BaseMessage]) -> Sequence[BaseMessage]:
    """Return the messages from the person's last one on."""
    starts = [index for index, message in enumerate(messages) if is_said(message)]
    return messages[starts[-1] :] if starts else ()
