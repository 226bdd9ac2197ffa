"""The hybrid chooses every token from DLite's distribution mixed with the copy of what followed the same words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
import torch

from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.hybrid import HybridDrafter
from dlite_agent.drafters.lookup import LookupDrafter, chance
from dlite_agent.drafters.protocol import DraftView, Proposal
from dlite_agent.engine.drafting import draft_draw
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.testing import random_dlite, tiny_target

TARGET = tiny_target()
K = 7


def dlite(seed: int = 0) -> DLiteDrafter:
    return DLiteDrafter(random_dlite(TARGET, num_drafts=K, seed=seed), TARGET.embedding)


def dlite_of_every_second_token(seed: int) -> DLiteDrafter:
    """DLite that can write the odd ids only."""
    written = torch.arange(1, TARGET.vocab_size, 2, dtype=torch.int32)
    model = random_dlite(TARGET, num_drafts=K, seed=seed, version="dlite_agent_v1", draft_vocab_size=len(written))
    model.draft_to_target.copy_(written)
    return DLiteDrafter(model, TARGET.embedding)


def saying(tokens: Iterable[int], sure: float = 0.9) -> DLiteDrafter:
    """DLite with a head that gives each of these tokens, in turn, this probability; all others share the rest."""
    drafter, said = dlite(), iter(tokens)

    def logits(states: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        p = torch.full((len(states), TARGET.vocab_size), (1 - sure) / (TARGET.vocab_size - 1))
        p[:, next(said)] = sure
        return p.log()

    drafter.model.sequential_head.logits = logits  # type: ignore[method-assign, assignment]
    return drafter


def view_of(ids: Sequence[int], drafted: Sequence[int] = (), *, max_tokens: int = K, seed: int = 0) -> DraftView:
    generator = torch.Generator().manual_seed(seed)
    pivot = torch.randn(len(TARGET.layer_ids), TARGET.hidden_size, generator=generator)
    return DraftView(np.array(ids, dtype=np.int32), drafted, pivot, max_tokens)


def proposed(drafter: DLiteDrafter, view: DraftView) -> Proposal:
    (proposal,) = HybridDrafter(LookupDrafter(), drafter).propose([view])
    return proposal


def mixture(p: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """The distribution behind `ids`, by trying every earlier place."""
    longest, copied = 0, -1
    for end in range(1, len(ids)):
        agreeing = 0
        while agreeing < min(end, 16) and ids[end - 1 - agreeing] == ids[len(ids) - 1 - agreeing]:
            agreeing += 1
        if agreeing and agreeing >= longest:
            longest, copied = agreeing, ids[end]
    mixed = p * (1 - chance(longest))
    if longest:
        mixed[copied] += chance(longest)
    return mixed


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("made", [dlite, dlite_of_every_second_token])
def test_each_token_is_the_likeliest_of_the_mixture_behind_those_before_it(
    made: Callable[[int], DLiteDrafter], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 12, size=30).tolist()
    drafter = made(seed)
    view = view_of(ids, seed=seed)
    proposal = proposed(drafter, view)
    tokens = torch.tensor([list(proposal.tokens)])
    assert view.pivot is not None
    hidden = drafter.model.hidden(view.pivot.unsqueeze(0), torch.tensor([ids[-1:]]), TARGET.embedding)
    logits = drafter.model.forced(hidden, torch.tensor([ids[-1:]]), tokens, TARGET.embedding)
    for k, token in enumerate(proposal.tokens):
        p = torch.softmax(logits[0, k], dim=-1)
        if drafter.model.written_ids is not None:
            p = torch.zeros(TARGET.vocab_size).index_copy(0, drafter.model.written_ids.long(), p)
        mixed = mixture(p, [*ids, *proposal.tokens[:k]])
        assert token == int(mixed.argmax())
        assert proposal.confidence[k] == pytest.approx(float(mixed[token]), abs=1e-6)
    assert len(proposal.tokens) == K


def test_a_draft_may_take_words_from_the_text_and_what_joins_them_from_dlite() -> None:
    copied = list(range(20, 32))
    proposal = proposed(saying([40, 20, *[99] * 5], sure=0.6), view_of([*copied, 50, 51]))
    assert list(proposal.tokens) == [40, 20, 99, 99, 99, 99, 99]  # nothing follows one token surely enough
    proposal = proposed(saying([40, 20, 21, 22, 99, 99, 99], sure=0.6), view_of([*copied, 50, 51]))
    assert list(proposal.tokens) == [40, 20, 21, 22, 23, 24, 25]
    assert list(proposal.sources) == ["dlite", "dlite", "dlite", "lookup", "lookup", "lookup", "lookup"]
    assert list(proposal.confidence[4:]) == sorted(proposal.confidence[4:])


def test_where_both_agree_the_token_is_surer_than_by_either() -> None:
    (sure,) = proposed(saying([7], sure=0.6), view_of([5, 6, 7, 1, 5, 6], max_tokens=1)).confidence
    assert sure == pytest.approx(chance(2) + (1 - chance(2)) * 0.6)


def test_behind_dlite_s_block_lookup_goes_on_alone() -> None:
    ids = [*range(20, 60), 20, 21, 22, 23, 24, 25]
    proposal = proposed(dlite(), view_of(ids, max_tokens=15))
    assert list(proposal.tokens) == list(range(26, 41))
    assert set(proposal.sources) == {"lookup"}
    assert list(proposal.confidence[K:]) == [chance(6 + k) for k in range(K, 15)]


def test_without_a_pivot_or_room_in_the_block_it_is_lookup() -> None:
    ids = [1, 2, 3, 4, 1, 2]
    bare = DraftView(np.array(ids, dtype=np.int32), (), None, K)
    full = view_of(ids, drafted=[3, 4, 1, 2, 3, 4, 1], max_tokens=3)
    for view in (bare, full):
        (expected,) = LookupDrafter().propose([view])
        got = proposed(dlite(), view)
        assert list(got.tokens) == list(expected.tokens) != []
        assert list(got.confidence) == list(expected.confidence)
        assert list(got.sources) == ["lookup"] * len(got.tokens)


def test_without_a_match_it_is_dlite() -> None:
    drafter, view = dlite(), view_of(list(range(30)), max_tokens=1)
    (alone,) = drafter.propose([view])
    got = proposed(drafter, view)
    assert (list(got.tokens), list(got.sources)) == (list(alone.tokens), ["dlite"])


def test_copies_are_looked_for_behind_what_is_forced() -> None:
    proposal = proposed(dlite(), view_of([*range(30), 3, 4, 5], drafted=[6, 7, 8], max_tokens=4))
    assert list(proposal.tokens) == [9, 10, 11, 12]


def test_texts_drafted_together_get_what_they_get_alone() -> None:
    drafter = HybridDrafter(LookupDrafter(), dlite())
    views = [
        view_of([1, 2, 3, 1, 2], seed=1),
        view_of(list(range(9)), drafted=[3, 4], max_tokens=2, seed=2),
        view_of([5] * 12, max_tokens=12, seed=3),
    ]
    for together, view in zip(drafter.propose(views), views, strict=True):
        (alone,) = drafter.propose([view])
        assert (list(together.tokens), list(together.sources)) == (list(alone.tokens), list(alone.sources))
        assert list(together.confidence) == pytest.approx(list(alone.confidence), abs=1e-6)


@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_a_sampled_draft_is_drawn_from_the_mixture(verification: str) -> None:
    ids = [5, 6, 7, 1, 5, 6]
    params = SamplingParams(temperature=1.0, verification=verification)  # type: ignore[arg-type]
    copies = 0
    for seed in range(400):
        view = view_of(ids, max_tokens=1)
        view = DraftView(view.ids, (), view.pivot, 1, draft_draw(replace_seed(params, seed), position=len(ids)))
        proposal = proposed(saying([9], sure=0.8), view)
        copies += proposal.tokens[0] == 7
        if verification == "rejection":
            (q,) = proposal.distributions
            assert float(q[7]) == pytest.approx(chance(2), abs=0.05)  # the 64 likeliest tokens count
            assert float(q.sum()) == pytest.approx(1.0)
        else:
            assert not proposal.distributions
    spread = math.sqrt(400 * chance(2) * (1 - chance(2)))
    assert abs(copies - 400 * chance(2)) < 4 * spread


def replace_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(temperature=params.temperature, verification=params.verification, seed=seed)


def test_how_long_a_sampled_draft_is_does_not_depend_on_what_was_drawn() -> None:
    params = SamplingParams(temperature=1.5, verification="rejection")
    lengths = set()
    for seed in range(20):
        draw = draft_draw(replace_seed(params, seed), position=6)
        view = view_of([5, 6, 7, 1, 5, 6], max_tokens=12)
        lengths.add(len(proposed(dlite(), DraftView(view.ids, (), view.pivot, 12, draw)).tokens))
    assert lengths == {K}


def test_a_drafter_that_says_nan_is_not_taken_for_a_sure_one() -> None:
    drafter = dlite()
    drafter.model.sequential_head.logits = lambda states, hidden: torch.full((1, 160), torch.nan)  # type: ignore[method-assign, assignment]
    assert all(math.isnan(sure) for sure in proposed(drafter, view_of([1, 2, 3])).confidence)


def test_chances_grow_with_what_agrees() -> None:
    chances = [chance(num_agreeing) for num_agreeing in range(40)]
    assert chances[0] == 0
    assert all(0 < sure < 1 for sure in chances[1:])
    assert chances == sorted(chances)
