"""What to decode, and what one pass makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dlite_agent.engine.attention import ROWWISE_MAX_ROWS
from dlite_agent.engine.constraint import TokenConstraint
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.verify import TokenLogprobs
from dlite_agent.errors import ConfigError

MAX_DRAFT = ROWWISE_MAX_ROWS - 1


@dataclass(frozen=True, slots=True)
class Request:
    """What to decode.

    Attributes:
        prompt_ids: The whole prompt; the state's rows are reused as far as they agree with it.
        sampling: How tokens are drawn.
        max_new_tokens: Upper bound of tokens generated.
        end_ids: Tokens that end the text; the end token itself is generated.
        constraint: A grammar, or None.
        max_draft: Longest draft verified at once, 0 to `MAX_DRAFT`.
        is_cancelled: Asked before every pass; True ends the iteration.
        on_prefill: Told (rows done, rows to do) after every prefill chunk.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 1024
    end_ids: frozenset[int] = frozenset()
    constraint: TokenConstraint | None = None
    max_draft: int = 7
    is_cancelled: Callable[[], bool] = lambda: False
    on_prefill: Callable[[int, int], None] = lambda done, total: None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1")
        if not 0 <= self.max_draft <= MAX_DRAFT:
            raise ConfigError(f"max_draft is {self.max_draft}; expected 0..{MAX_DRAFT}")


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens one target pass gave one text.

    Attributes:
        tokens: New tokens, in order.
        sources: Where each came from: "prefill", "forced", a drafter's name, or "bonus".
        logprobs: The target's log-probabilities of the tokens, where `SamplingParams.top_logprobs` asks for them.
        num_proposed: Length of the draft that was verified.
        num_faults: Drafts dropped because the drafter broke its contract.
        num_shared: Texts that the pass served.
        draft_seconds: Time spent drafting, for all texts of the pass.
        target_seconds: Time spent in the target and in verification, for all texts of the pass; of the first step, all
            chunks of the prefill.
        num_reused: Prompt rows that were already there (first step only).
        num_prefilled: Prompt rows that were computed (first step only).
    """

    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_proposed: int = 0
    num_faults: int = 0
    num_shared: int = 1
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    num_reused: int = 0
    num_prefilled: int = 0
