"""What a draft costs by context length, beside the target's verify pass there.

Drafters without a memory of their texts draft behind rows of noise, which cost what any rows cost; one with a memory
must have read what it drafts from, so its rows are computed. The first draft of a text, which brings a drafter's state
up to date, is left out (`turn_changes` measures it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlite_agent.bench import passes
from dlite_agent.bench.contest import OurSide, Spread, tap
from dlite_agent.bench.drafters.sessions import Contestant
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target

_MAX_TOKENS = 24
_NOT_COUNTED = 2  # the step that ends the prefill, and the first draft


@dataclass(slots=True)
class DraftCost:
    """What drafts cost at one context length.

    Attributes:
        draft_ms: Time to draft, step by step.
        verify_ms: Time in the target and in verification.
        held_bytes: What the drafter holds there.
    """

    draft_ms: list[float] = field(default_factory=list)
    verify_ms: list[float] = field(default_factory=list)
    held_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return medians for JSON."""
        spreads = {"draft_ms": Spread.of(self.draft_ms).as_dict(), "verify_ms": Spread.of(self.verify_ms).as_dict()}
        return {**spreads, "held_bytes": self.held_bytes}


Costs = dict[str, dict[int, DraftCost]]
"""Costs by drafter and context length."""


def draft_costs(
    target: Target,
    contestants: Sequence[Contestant],
    ids: Sequence[int],
    *,
    contexts: Sequence[int],
    num_rounds: int,
) -> Costs:
    """Measure all drafters at some context lengths, lengths and drafters alternating.

    Args:
        target: The target.
        contestants: The drafters.
        ids: A text at least as long as the longest context.
        contexts: Context lengths in tokens, ascending.
        num_rounds: How often each drafts at each.
    """
    costs: Costs = {contestant.spec: {context: DraftCost() for context in contexts} for contestant in contestants}
    prompts = {context: list(ids[:context]) for context in contexts}
    noise = {context: _noise(target, prompts[context]) for context in contexts} if target.is_restorable else {}
    own: dict[tuple[str, int], OurSide] = {}
    for number in range(num_rounds):
        for context, prompt in prompts.items():
            assert len(prompt) == context
            for contestant in contestants:
                if contestant.has_memory or not noise:
                    side = own.setdefault((contestant.spec, context), OurSide(target, end_ids=frozenset()))
                else:
                    side = noise[context]
                cost = costs[contestant.spec][context]
                if number:
                    _draft(contestant, side, prompt, cost)
                    continue
                held = contestant.held()
                _draft(contestant, side, prompt, cost)
                cost.held_bytes = contestant.held() - held
    return costs


def _noise(target: Target, prompt: Sequence[int]) -> OurSide:
    side = OurSide(target, end_ids=frozenset())
    side.state = TargetState(target.new_cache())
    passes.fill(target, side.state.cache, len(prompt) - 1)
    side.state.append(prompt)
    return side


def _draft(contestant: Contestant, side: OurSide, prompt: Sequence[int], cost: DraftCost) -> None:
    tap(side.target, contestant.layer_ids)
    steps = list(side.steps(prompt, contestant.drafter, max_tokens=_MAX_TOKENS))
    for step in steps[_NOT_COUNTED:]:
        cost.draft_ms.append(step.draft_seconds * 1e3)
        cost.verify_ms.append(step.target_seconds * 1e3)
