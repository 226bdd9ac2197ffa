"""Rows go where they pay, what does not pay is left alone and tried again, and the text never changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, product
from operator import mul
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.hybrid import HybridDrafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter, DraftView, Proposal
from dlite_agent.engine.decode import decode, resume
from dlite_agent.engine.draft_length import AdaptiveLength, PassCost
from dlite_agent.engine.drafting import Draft
from dlite_agent.engine.request import Request, Step
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.testing import ScriptedDrafter, random_dlite, tiny_target

PROMPT = list(range(3, 15))
FLAT = PassCost({1: 1.0, 64: 1.001})
STEEP = PassCost({n: float(n) for n in range(1, 65)})


def draft_of(confidence: Sequence[float]) -> Draft:
    draft = Draft(None, frozenset(), room=31)
    draft.begin()
    draft.extend(Proposal(list(range(len(confidence))), "some", list(confidence)))
    return draft


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    confidences=st.lists(st.lists(st.floats(0.05, 1), max_size=4), min_size=1, max_size=3),
    steps=st.lists(st.floats(0.001, 1), min_size=16, max_size=16),
    draft_seconds=st.floats(0, 1),
)
def test_the_cut_is_the_best_there_is(confidences: list[list[float]], steps: list[float], draft_seconds: float) -> None:
    cost = PassCost(dict(enumerate(accumulate(steps), start=1)))
    planner, drafts = AdaptiveLength(cost), [draft_of(confidence) for confidence in confidences]
    known = len(drafts)

    def rate(lengths: Sequence[int]) -> float:
        chances = [list(accumulate(confidence, mul)) for confidence in confidences]
        expected = known + sum(sum(one[:length]) for one, length in zip(chances, lengths, strict=True))
        return expected / (draft_seconds + cost(known + sum(lengths)))

    planner.cut(drafts, num_known=known, draft_seconds=draft_seconds)
    best = max(rate(lengths) for lengths in product(*(range(len(c) + 1) for c in confidences)))
    assert rate([len(draft.tokens) for draft in drafts]) == pytest.approx(best)


def test_a_cut_keeps_the_mask_behind_the_last_token() -> None:
    draft = draft_of([0.9, 0.9, 0.9])
    draft.cut(1)
    assert (draft.tokens, draft.sources, draft.confidence) == ([0], ["some"], [0.9])
    assert len(draft.bitmasks) == 2


def test_the_cost_between_two_counts_is_the_larger_ones_and_beyond_it_grows() -> None:
    cost = PassCost({1: 1.0, 4: 2.0, 8: 3.0})
    assert [cost(n) for n in (1, 2, 4, 5, 8, 16)] == [1.0, 2.0, 2.0, 3.0, 3.0, 6.0]


def test_a_pass_costs_no_more_than_a_larger_one_whatever_was_measured() -> None:
    cost = PassCost({1: 3.0, 2: 2.0, 4: 9.0, 8: 2.5, 16: 4.0})
    assert [cost(n) for n in (1, 2, 3, 4, 8, 9, 32)] == [2.0, 2.0, 2.5, 2.5, 2.5, 4.0, 8.0]


def test_a_while_in_which_the_machine_is_busy_spoils_no_cost(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    now, num_readings = 0.0, 0

    def clock() -> float:
        nonlocal now, num_readings
        num_readings += 1
        now += 10.0 if 20 < num_readings <= 60 else 1.0  # between the tenth pass and the thirtieth
        return now

    monkeypatch.setattr("dlite_agent.engine.draft_length.time.perf_counter", clock)
    assert set(PassCost.measure(llama).seconds.values()) == {1.0}
    assert num_readings > 80


@pytest.mark.parametrize("seconds", [{}, {2: 1.0}, {1: 0.0}, {1: -1.0}])
def test_costs_that_cannot_be_are_refused(seconds: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="pass costs"):
        PassCost(seconds)


@pytest.mark.parametrize(
    "damage",
    [
        *[None, "{", "[]", "{}", '{"1": "x"}', '{"1": -3}', '{"a": 1}'],
        pytest.param('{"1": 1' + "0" * 400 + "}", id="huge"),
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_costs_are_measured_once_and_again_if_the_file_is_damaged(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str | None
) -> None:
    first = PassCost.of(llama, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    assert {int(rows): seconds for rows, seconds in json.loads(path.read_text()).items()} == first.seconds
    measured = PassCost({1: 5.0})
    monkeypatch.setattr(PassCost, "measure", lambda target: measured)
    if damage is not None:
        path.write_text(damage)
    assert PassCost.of(llama, folder=tmp_path) == (first if damage is None else measured)
    assert PassCost.of(tiny_target("llama", seed=1), folder=tmp_path) == measured  # another target's are its own


def test_a_context_that_is_too_short_to_measure_all_counts_is_enough() -> None:
    cost = PassCost.measure(tiny_target(max_position_embeddings=16))
    assert max(cost.seconds) == 8


class Counting:
    """Proposes its script and counts how often it was asked."""

    def __init__(self, script: ScriptedDrafter) -> None:
        self.name = script.name
        self.script = script
        self.num_asked = 0

    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        self.num_asked += 1
        return self.script.propose(views)


def run(target: Target, drafter: Drafter, planner: AdaptiveLength | None, *, length: int = 300) -> list[Step]:
    request = Request(PROMPT, max_new_tokens=length)
    return list(decode(target, TargetState(target.new_cache()), drafter, request, planner=planner))


def text_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def test_a_right_drafter_soon_drafts_as_long_as_it_may(llama: Target) -> None:
    plain = text_of(run(llama, NullDrafter(), None))
    steps = run(llama, ScriptedDrafter(plain, start=len(PROMPT)), AdaptiveLength(FLAT))
    assert text_of(steps) == plain
    assert [step.num_proposed for step in steps[2:-1]] == [7] * (len(steps) - 3)


def test_where_a_row_costs_a_pass_even_a_good_drafter_is_given_up(llama: Target) -> None:
    plain = text_of(run(llama, NullDrafter(), None))
    wrong = [token if i % 3 else (token + 1) % 150 for i, token in enumerate(plain)]
    drafter = Counting(ScriptedDrafter(wrong, start=len(PROMPT)))
    steps = run(llama, drafter, AdaptiveLength(STEEP))
    assert text_of(steps) == plain
    assert sum(step.num_proposed for step in steps) < 0.2 * len(plain)


def test_a_wrong_drafter_is_asked_less_and_less_and_noticed_when_it_is_right_again(llama: Target) -> None:
    plain = text_of(run(llama, NullDrafter(), None, length=450))
    cost, turn = PassCost({1: 1.0, 2: 1.5, 4: 2.0, 8: 2.5}), 250
    wrong = [(token + 1) % 150 if i < turn else token for i, token in enumerate(plain)]
    drafter = Counting(ScriptedDrafter(wrong, start=len(PROMPT)))
    planner = AdaptiveLength(cost)
    steps = run(llama, drafter, planner, length=450)
    assert text_of(steps) == plain
    first = [step for step, seen in zip(steps, accumulate(len(s.tokens) for s in steps), strict=True) if seen < turn]
    assert sum(step.num_proposed for step in first[len(first) // 2 :]) < 0.2 * len(first)
    assert sum(len(step.tokens) - 1 for step in steps[len(first) :]) > 50  # accepted drafts came back


def test_what_one_text_teaches_the_next_one_uses(llama: Target) -> None:
    plain = text_of(run(llama, NullDrafter(), None, length=80))
    wrong = ScriptedDrafter([(token + 1) % 150 for token in plain], start=len(PROMPT))
    planner = AdaptiveLength(PassCost({1: 1.0, 2: 1.5, 8: 3.0}))
    first, second = (run(llama, wrong, planner, length=80) for _ in range(2))
    assert sum(step.num_proposed for step in second) < sum(step.num_proposed for step in first)


def test_a_drafter_that_takes_longer_than_it_saves_is_asked_ever_less_often(llama: Target) -> None:
    planner, asked = AdaptiveLength(PassCost({1: 1.0, 8: 1.2})), []
    for number in range(600):
        if planner.limit("slow"):
            asked.append(number)
            draft = draft_of([0.3, 0.3])
            planner.cut([draft], num_known=1, draft_seconds=5.0)
            step = Step((1,), ("bonus",), num_proposed=len(draft.tokens))
            planner.observe([draft], [step], draft_seconds=5.0)
        else:
            planner.observe([Draft(None, frozenset(), 0)], [Step((1,), ("bonus",))], draft_seconds=0.0)
    gaps = [after - before for before, after in pairwise(asked)]
    assert len(asked) < 20
    assert gaps[-1] > 100
    assert asked[-1] > 200  # but it is asked again


class Peaked:
    """Samples a first token evenly; what it is decides how sure the drafter is of the next ones."""

    name = "peaked"

    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        return [self.draft(view) for view in views]

    def draft(self, view: DraftView) -> Proposal:
        assert view.draw is not None
        tokens, distributions = list[int](), list[torch.Tensor]()
        for k in range(view.max_tokens):
            logits = torch.full((160,), -50.0)
            logits[:4] = 0.0
            if tokens and tokens[0] == 0:
                logits[1] = 5.0
            token, q = view.draw(logits, k)
            assert q is not None
            tokens.append(token)
            distributions.append(q)
        return Proposal(tokens, self.name, (), distributions)


def hybrid(target: Target) -> HybridDrafter:
    return HybridDrafter(LookupDrafter(), DLiteDrafter(random_dlite(target), target.embedding))


@pytest.mark.parametrize("made", [lambda target: Peaked(), hybrid], ids=["alone", "hybrid"])
def test_what_was_drawn_does_not_decide_the_length_of_a_sampled_draft(made: Callable[[Target], Drafter]) -> None:
    """It would bias rejection sampling: four tokens are equally likely here, and must come equally often."""
    target = tiny_target()
    drafter = made(target)
    even = torch.full((160,), -50.0)
    even[:4] = 0.0
    target.model.lm_head.register_forward_hook(lambda module, inputs, output: even.expand_as(output))
    counts = [0] * 4
    cost = PassCost({1: 1.0, 64: 1.6})
    state = TargetState(target.new_cache())
    state.begin(np.array(PROMPT, dtype=np.int32))
    target.forward(PROMPT[:-1], state.cache)
    for seed in range(1200):
        state.truncate(len(PROMPT))
        sampling = SamplingParams(temperature=1.0, seed=seed, verification="rejection")
        request = Request([], sampling=sampling, max_new_tokens=4, max_draft=3)
        (step, *_) = resume(
            target, state, drafter, request, planner=AdaptiveLength(cost)
        )  # one that has learnt nothing
        counts[step.tokens[0]] += 1
    assert sum((count - 300) ** 2 / 300 for count in counts) < 16.3  # chi-square, 3 degrees, p = 0.001


def test_a_pause_is_one_of_passes_not_of_texts() -> None:
    planner = AdaptiveLength(PassCost({1: 1.0, 8: 1.2}))
    for _ in range(20):  # too slow to pay
        if planner.limit("slow"):
            planner.observe([draft_of([0.3])], [Step((1,), ("bonus",), num_proposed=1)], draft_seconds=9.0)
        else:
            break
    else:
        pytest.fail("it was never given up")
    assert {planner.limit("slow") for _ in range(50)} == {0}


@pytest.mark.parametrize("seconds", [{1: float("nan")}, {1: 1.0, 2: float("inf")}])
def test_costs_that_are_no_numbers_are_refused(seconds: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="pass costs"):
        PassCost(seconds)
