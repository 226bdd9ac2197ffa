"""Lookup proposes what really followed the longest, latest match of the text's end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.protocol import Drafter, DraftView, Proposal
from dlite_agent.errors import ConfigError
from dlite_agent.testing import ScriptedDrafter


def view_of(ids: Sequence[int], drafted: Sequence[int] = (), *, max_tokens: int = 7) -> DraftView:
    return DraftView(np.array(ids, dtype=np.int32), drafted, torch.zeros(1, 1), max_tokens)


def searched(ids: Sequence[int], *, min_match: int, max_match: int) -> int | None:
    """The index behind the best match, by trying all of them."""
    for length in range(min(max_match, len(ids) - 1), min_match - 1, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == ids[len(ids) - length :]:
                return end
    return None


def proposed(drafter: Drafter, view: DraftView) -> Proposal:
    (proposal,) = drafter.propose([view])
    return proposal


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    ids=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    num_drafted=st.integers(0, 6),
    min_match=st.integers(1, 4),
    extra=st.integers(0, 5),
    max_tokens=st.integers(1, 9),
)
def test_the_proposal_is_what_followed_the_longest_latest_match(
    ids: list[int], num_drafted: int, min_match: int, extra: int, max_tokens: int
) -> None:
    drafter = LookupDrafter(min_match=min_match, max_match=min_match + extra)
    cut = max(1, len(ids) - num_drafted)
    proposal = proposed(drafter, view_of(ids[:cut], ids[cut:], max_tokens=max_tokens))
    end = searched(ids, min_match=min_match, max_match=min_match + extra)
    assert list(proposal.tokens) == ([] if end is None else ids[end : end + max_tokens])
    assert proposal.source == "lookup"
    assert all(type(token) is int for token in proposal.tokens)


@pytest.mark.parametrize("ids", [[], [1], [1, 2], [1, 2, 3, 4]], ids=str)
def test_nothing_is_proposed_without_a_match(ids: list[int]) -> None:
    assert list(proposed(LookupDrafter(), view_of(ids)).tokens) == []


def test_a_repeating_text_is_continued_through_its_own_end() -> None:
    assert list(proposed(LookupDrafter(), view_of([5, 5, 5])).tokens) == [5]
    assert list(proposed(LookupDrafter(), view_of([1, 2] * 3)).tokens) == [1, 2]


def test_the_match_may_begin_at_the_first_token() -> None:
    assert list(proposed(LookupDrafter(), view_of([7, 8, 9, 1, 7, 8])).tokens) == [9, 1, 7, 8]


def test_a_long_match_is_preferred_to_a_late_one_up_to_the_most_that_counts() -> None:
    ids = [1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 1, 2, 3, 4]
    assert proposed(LookupDrafter(), view_of(ids)).tokens[0] == 50
    assert proposed(LookupDrafter(max_match=3), view_of(ids)).tokens[0] == 60


@pytest.mark.parametrize(("min_match", "max_match"), [(0, 4), (5, 4), (-1, -1)])
def test_match_lengths_that_cannot_work_are_refused(min_match: int, max_match: int) -> None:
    with pytest.raises(ConfigError, match="min_match"):
        LookupDrafter(min_match=min_match, max_match=max_match)


def test_a_longer_match_is_surer_and_so_is_each_token_behind_it() -> None:
    short, long = (
        proposed(LookupDrafter(), view_of([1, 2, 8, 1, 2])),
        proposed(LookupDrafter(), view_of([1, 2, 3, 8, 1, 2, 3])),
    )
    assert long.confidence[0] > short.confidence[0]
    assert list(short.confidence) == sorted(short.confidence)
    assert all(0 <= sure <= 1 for sure in [*short.confidence, *long.confidence])


def test_a_script_is_read_by_position() -> None:
    script = ScriptedDrafter([10, 11, 12, 13], start=5)
    assert list(proposed(script, view_of([0] * 4)).tokens) == []
    assert list(proposed(script, view_of([0] * 5, max_tokens=2)).tokens) == [10, 11]
    assert list(proposed(script, view_of([0] * 5, [9, 9])).tokens) == [12, 13]
    assert list(proposed(script, view_of([0] * 9)).tokens) == []
