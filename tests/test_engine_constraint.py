"""Under a grammar speculation gives the masked target's own text, and the grammar stands where the text stands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter, DraftView, Proposal
from dlite_agent.engine.constraint import TokenConstraint
from dlite_agent.engine.decode import decode, resume
from dlite_agent.engine.request import Request, Step
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.testing import ScriptedDrafter
from tests.rules import (
    END,
    RULES,
    VOCAB,
    Rule,
    RuleConstraint,
    at_once_forced_to_the_end,
    even,
    free_then_forced,
    may_end,
    ten_then_end,
)

PROMPT = list(range(3, 15))
LENGTH = 24


def steps_of(
    target: Target, drafter: Drafter, constraint: TokenConstraint, sampling: SamplingParams, max_draft: int = 7
) -> list[Step]:
    request = Request(
        PROMPT,
        sampling=sampling,
        max_new_tokens=LENGTH,
        end_ids=frozenset([END]),
        constraint=constraint,
        max_draft=max_draft,
    )
    return list(decode(target, TargetState(target.new_cache()), drafter, request))


def text_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@cache
def masked(target: Target, rule: Rule) -> list[int]:
    """The most likely allowed tokens, one whole pass each."""
    text: list[int] = []
    while len(text) < LENGTH and END not in text:
        logits = target.forward(PROMPT + text, target.new_cache()).logits[-1]
        text.append(max(rule(text), key=lambda token: float(logits[token])))
    return text


def wrong_in_places(text: Sequence[int]) -> list[int]:
    return [(token + 2) % VOCAB if i % 5 == 4 else token for i, token in enumerate(text)]


DRAFTERS: dict[str, Callable[[Sequence[int]], Drafter]] = {
    "null": lambda text: NullDrafter(),
    "lookup": lambda text: LookupDrafter(min_match=1),
    "right": lambda text: ScriptedDrafter(text, start=len(PROMPT)),
    "some wrong": lambda text: ScriptedDrafter(wrong_in_places(text), start=len(PROMPT)),
    "ends early": lambda text: ScriptedDrafter([*text[:6], END, *text[7:]], start=len(PROMPT)),
    "forbidden": lambda text: ScriptedDrafter([1] * LENGTH, start=len(PROMPT)),
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_text_is_the_masked_targets(llama: Target, rule: Rule, name: str) -> None:
    text = masked(llama, rule)
    steps = steps_of(llama, DRAFTERS[name](text), RuleConstraint(rule), SamplingParams())
    assert text_of(steps) == text
    for place, token in enumerate(text):
        assert token in rule(text[:place])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_seeded_text_is_the_same_with_any_drafter(llama: Target, rule: Rule) -> None:
    sampling = SamplingParams(1.0, top_k=30, top_p=0.95, seed=6)
    text = text_of(steps_of(llama, NullDrafter(), RuleConstraint(rule), sampling, max_draft=0))
    for make in DRAFTERS.values():
        for max_draft in (1, 7):
            assert text_of(steps_of(llama, make(text), RuleConstraint(rule), sampling, max_draft)) == text


def test_every_family_gives_the_masked_text(target: Target) -> None:
    text = text_of(steps_of(target, NullDrafter(), RuleConstraint(may_end), SamplingParams(), max_draft=0))
    for make in DRAFTERS.values():
        assert text_of(steps_of(target, make(text), RuleConstraint(may_end), SamplingParams())) == text


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_after_every_step_the_grammar_stands_behind_the_tokens_given(llama: Target, rule: Rule, name: str) -> None:
    constraint, given = RuleConstraint(rule), list[int]()
    request = Request(PROMPT, max_new_tokens=LENGTH, end_ids=frozenset([END]), constraint=constraint)
    drafter = DRAFTERS[name](masked(llama, rule))
    for step in decode(llama, TargetState(llama.new_cache()), drafter, request):
        given += step.tokens
        assert constraint.path == [token for token in given if token != END]


def test_forced_tokens_are_drafted_without_the_drafter_and_on_both_sides_of_it(llama: Target) -> None:
    steps = steps_of(llama, NullDrafter(), RuleConstraint(at_once_forced_to_the_end), SamplingParams())
    assert [step.sources for step in steps] == [("prefill",), ("forced",) * 7 + ("bonus",), ("bonus",)]
    text = masked(llama, free_then_forced)
    steps = steps_of(
        llama, ScriptedDrafter(text, start=len(PROMPT)), RuleConstraint(free_then_forced), SamplingParams()
    )
    assert steps[1].sources == ("scripted",) * 2 + ("forced",) * 3 + ("scripted",) * 2 + ("bonus",)
    short = ScriptedDrafter(text[:3], start=len(PROMPT))
    steps = steps_of(llama, short, RuleConstraint(free_then_forced), SamplingParams())
    assert steps[1].sources == ("scripted",) * 2 + ("forced",) * 3 + ("bonus",)


def test_a_drafted_end_token_that_is_accepted_ends_the_text(llama: Target) -> None:
    text = masked(llama, ten_then_end)
    constraint = RuleConstraint(ten_then_end)
    steps = steps_of(llama, ScriptedDrafter(text, start=len(PROMPT)), constraint, SamplingParams())
    assert text_of(steps) == text
    assert (text[-1], len(text)) == (END, 11)
    assert steps[-1].sources[-1] == "forced"
    assert constraint.path == text[:-1]


@pytest.mark.parametrize("max_draft", [3, 7])
def test_a_fault_of_the_drafter_leaves_the_forced_tokens_in_the_draft(llama: Target, max_draft: int) -> None:
    """By then the grammar has walked along the forced tokens of the draft."""

    class Failing:
        name = "failing"

        def propose(self, views: Sequence[DraftView]) -> Sequence[Proposal]:
            assert all(len(view.drafted) > 0 for view in views)
            raise RuntimeError("the drafter failed")

    def two_forced_then_free(path: Sequence[int]) -> Collection[int]:
        return {60 + len(path)} if len(path) < 3 else range(VOCAB - 1)

    constraint = RuleConstraint(two_forced_then_free)
    state = TargetState(llama.new_cache())
    request = Request(PROMPT, constraint=constraint, end_ids=frozenset([END]), max_draft=max_draft)
    steps = decode(llama, state, Failing(), request)
    assert next(steps).tokens == (60,)
    second = next(steps)
    assert second.tokens[:2] == (61, 62)
    assert second.sources == ("forced", "forced", "bonus")
    assert second.num_faults == 1
    assert constraint.path == [60, *second.tokens]
    assert state.ids.tolist() == [*PROMPT, 60, *second.tokens]


@pytest.mark.parametrize("breaking", ["bitmask", "advance"])
def test_an_error_of_the_grammar_amid_a_draft_leaves_it_behind_the_text(llama: Target, breaking: str) -> None:
    class Breaking(RuleConstraint):
        is_broken = False

        def bitmask(self) -> npt.NDArray[np.int32]:
            self.fail_in("bitmask")
            return super().bitmask()

        def advance(self, token_id: int) -> None:
            self.fail_in("advance")
            super().advance(token_id)

        def fail_in(self, method: str) -> None:
            if self.is_broken and method == breaking and len(self.path) > 3:
                raise RuntimeError("the grammar is stuck")

    constraint = Breaking(even)
    request = Request(PROMPT, constraint=constraint, max_new_tokens=LENGTH)
    text = masked(llama, even)
    steps = decode(llama, TargetState(llama.new_cache()), ScriptedDrafter(text, start=len(PROMPT)), request)
    next(steps)
    constraint.is_broken = True
    with pytest.raises(RuntimeError, match="stuck"):
        next(steps)
    assert constraint.path == text[:1]


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_sampled_drafts_that_a_grammar_forbids_leave_the_distribution_alone(llama: Target, temperature: float) -> None:
    """A draft that was cut before a forbidden token, because of that token, would favour what is not drafted."""
    allowed = range(0, VOCAB - 1, 3)
    row = llama.forward(PROMPT, llama.new_cache()).logits[0]
    likely = row.clone()
    likely[[token for token in range(VOCAB) if token not in allowed]] = -torch.inf
    draft_logits = torch.full((VOCAB,), -30.0)
    draft_logits[likely.topk(3).indices] = likely.topk(3).values * 1.2
    draft_logits[[1, 2]] = float(likely.max())  # forbidden

    class Sampling:
        name = "sampling"

        def propose(self, views: Sequence[DraftView]) -> Sequence[Proposal]:
            return [self.draft(view) for view in views]

        def draft(self, view: DraftView) -> Proposal:
            assert view.draw is not None
            token, q = view.draw(draft_logits, 0)
            assert q is not None
            return Proposal([token], self.name, (), [q])

    state = TargetState(llama.new_cache())
    params = SamplingParams(temperature=temperature, verification="rejection")
    counts = np.zeros(VOCAB)
    state.begin(np.array(PROMPT, dtype=np.int32))
    llama.forward(PROMPT[:-1], state.cache)
    num_draws, num_drafts = 1500, 0
    for seed in range(num_draws):
        state.truncate(len(PROMPT))
        constraint = RuleConstraint(lambda path: allowed)
        request = Request(
            [], sampling=replace(params, seed=seed), constraint=constraint, max_new_tokens=2, end_ids=frozenset([END])
        )
        (step, *_) = resume(llama, state, Sampling(), request)
        counts[step.tokens[0]] += 1
        num_drafts += step.num_proposed
    assert num_drafts == num_draws  # forbidden or not, each stayed in its draft
    expected = num_draws * torch.softmax(likely.double() / temperature, dim=-1).numpy()
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    statistic = float(((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum())
    freedom = int(common.sum())
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations of chi-square
