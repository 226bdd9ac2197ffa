"""Verified text follows the target's distribution, in exact mode to the token, with the target's log-probabilities."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlite_agent.bitmask import Bitmask
from dlite_agent.engine import verify as verify_module
from dlite_agent.engine.processors import Sampler
from dlite_agent.engine.sampling import SamplingParams, derived_seed, draw, gumbel_noise
from dlite_agent.engine.verify import Verdict, check_distributions, token_logprobs, verify
from dlite_agent.errors import CorruptModelError, GrammarError

VOCAB = 6
TRIALS = 1200
NO_END: frozenset[int] = frozenset()
MASK = np.array([0b101110], dtype=np.int32)
TEMPERATURES = (0.3, 1.0, 1.5)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.8},
    "mask": {},
    "processors": {"presence_penalty": 2.0, "bad_words": ((1, 2), (4, 4), (3,))},
}


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 0.8


class Chain:
    """A target, or a drafter, whose logits depend on the token before and on the position, if little."""

    def __init__(self, seed: int) -> None:
        self.table = logits_of(seed, rows=3 * VOCAB).view(3, VOCAB, VOCAB)

    def row(self, text: Sequence[int]) -> torch.Tensor:
        return self.table[len(text) % 3, text[-1] if text else 0]

    def rows(self, text: Sequence[int], draft: Sequence[int]) -> torch.Tensor:
        return torch.stack([self.row([*text, *draft[:k]]) for k in range(len(draft) + 1)])


TARGET, OTHER = Chain(1), Chain(2)
Table = NDArray[np.float64]
Draft = tuple[list[int], list[torch.Tensor | None]]
DraftSource = Callable[[list[int], torch.Generator], Draft]


def sampled_draft(text: list[int], chance: torch.Generator) -> Draft:
    """Two tokens sampled from the other chain, and what from."""
    draft: list[int] = []
    distributions: list[torch.Tensor | None] = []
    for _ in range(2):
        q = OTHER.row([*text, *draft]).softmax(-1)
        draft.append(int(torch.multinomial(q, 1, generator=chance)))
        distributions.append(q)
    return draft, distributions


def mixed_draft(text: list[int], chance: torch.Generator) -> Draft:
    """A token chosen without chance, then one that was sampled."""
    first = int(OTHER.row(text).argmax())
    q = OTHER.row([*text, first]).softmax(-1)
    return [first, int(torch.multinomial(q, 1, generator=chance))], [None, q]


def point_draft(text: list[int], chance: torch.Generator) -> Draft:
    """Two tokens chosen without chance."""
    first = int(OTHER.row(text).argmax())
    return [first, int(OTHER.row([*text, first]).argmax())], []


def argmax_draft_with_softmax(text: list[int], chance: torch.Generator) -> Draft:
    """The mistake: tokens chosen without chance, with the probabilities of ones that were sampled."""
    draft, _ = point_draft(text, chance)
    return draft, [OTHER.row([*text, *draft[:k]]).softmax(-1) for k in range(2)]


def decoded(
    params: SamplingParams, source: DraftSource, chance: torch.Generator, *, bitmask: Bitmask | None
) -> list[int]:
    """Return the first two tokens of a text that is drafted and verified."""
    text: list[int] = []
    sampler = Sampler(params, prompt_ids=())
    while len(text) < 2:
        draft, distributions = source(text, chance)
        verdict = verify(
            TARGET.rows(text, draft),
            draft,
            sampler,
            position=len(text),
            bitmask_at=lambda _: bitmask,
            distributions=distributions,
        )
        sampler.advance(verdict.tokens)
        text += verdict.tokens
    return text[:2]


def expected_joint(params: SamplingParams, bitmask: Bitmask | None) -> Table:
    """The probability of each pair of tokens, in plain Python."""
    joint = np.zeros((VOCAB, VOCAB))
    for first, p in enumerate(expected_row([], params, bitmask)):
        joint[first] = [p * q for q in expected_row([first], params, bitmask)]
    return joint


def expected_row(text: list[int], params: SamplingParams, bitmask: Bitmask | None) -> list[float]:
    logits = [value - params.presence_penalty * (k in text) for k, value in enumerate(TARGET.row(text).tolist())]
    weights = [math.exp(value / params.temperature) for value in logits]
    weights = [0.0 if {(k,), (*text[-1:], k)} & set(params.bad_words) else w for k, w in enumerate(weights)]
    if bitmask is not None:
        weights = [weight * (int(bitmask[0]) >> token & 1) for token, weight in enumerate(weights)]
    total, mass, kept = sum(weights), 0.0, set()
    for token in sorted(range(VOCAB), key=lambda token: -weights[token]):
        if mass / total < params.top_p:
            kept.add(token)
        mass += weights[token]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(VOCAB)]


def chi_square(counts: Table, probabilities: Table) -> tuple[float, float]:
    """Return the statistic of outcomes' frequencies, and the value that chance exceeds once in about 30,000 times.

    Outcomes expected less than five times are counted together. An impossible one that came makes it infinite.
    """
    expected = probabilities * counts.sum()
    if counts[expected == 0.0].any():
        return math.inf, 0.0
    is_rare = expected < 5.0
    seen = np.append(counts[~is_rare], counts[is_rare].sum())
    due = np.append(expected[~is_rare], expected[is_rare].sum())
    seen, due = seen[due > 0.0], due[due > 0.0]
    spread = 2 / (9 * (len(due) - 1))  # Wilson and Hilferty
    return float(((seen - due) ** 2 / due).sum()), (len(due) - 1) * (1 - spread + 4.0 * math.sqrt(spread)) ** 3


def joint_chi_square(
    source: DraftSource, params: SamplingParams, bitmask: Bitmask | None = None
) -> tuple[float, float]:
    """Decode the first two tokens of many texts; return the statistic of the pairs, and its limit."""
    chance = torch.Generator().manual_seed(1234)
    counts = np.zeros((VOCAB, VOCAB))
    for seed in range(TRIALS):
        first, second = decoded(dataclasses.replace(params, seed=seed), source, chance, bitmask=bitmask)
        counts[first, second] += 1
    return chi_square(counts, expected_joint(params, bitmask))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("source", [sampled_draft, point_draft])
def test_rejection_gives_the_targets_joint_distribution(temperature: float, shape: str, source: DraftSource) -> None:
    params = SamplingParams(temperature, verification="rejection", **SHAPES[shape])
    statistic, limit = joint_chi_square(source, params, MASK if shape == "mask" else None)
    assert statistic < limit


@pytest.mark.parametrize("shape", SHAPES)
def test_rejection_may_be_of_chosen_and_sampled_tokens_in_one_draft(shape: str) -> None:
    params = SamplingParams(1.0, verification="rejection", **SHAPES[shape])
    statistic, limit = joint_chi_square(mixed_draft, params, MASK if shape == "mask" else None)
    assert statistic < limit


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("source", [sampled_draft, point_draft])
def test_exact_gives_the_targets_joint_distribution(temperature: float, shape: str, source: DraftSource) -> None:
    statistic, limit = joint_chi_square(
        source, SamplingParams(temperature, **SHAPES[shape]), MASK if shape == "mask" else None
    )
    assert statistic < limit


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_statistic_finds_chosen_drafts_that_claim_to_be_sampled(temperature: float) -> None:
    statistic, limit = joint_chi_square(
        argmax_draft_with_softmax, SamplingParams(temperature, verification="rejection")
    )
    assert statistic > 2 * limit


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("source", [sampled_draft, mixed_draft, point_draft])
def test_the_statistic_finds_a_residual_drawn_from_p(
    temperature: float, source: DraftSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "_residual", lambda p, q: p)
    statistic, limit = joint_chi_square(source, SamplingParams(temperature, verification="rejection"))
    assert statistic > 2 * limit


def coupled_chi_square() -> tuple[float, float]:
    """Decode first tokens whose drafts were sampled with the noise that the target itself would draw with."""
    p = np.array([0.035, 0.4, 0.255, 0.001, 0.02, 0.289])
    q = torch.tensor([0.132, 0.001, 0.151, 0.361, 0.181, 0.174])
    counts = np.zeros(VOCAB)
    for seed in range(4 * TRIALS):
        draft = [int((q.double().log() + gumbel_noise(torch.arange(VOCAB), seed=seed, position=0)).argmax())]
        sampler = Sampler(SamplingParams(1.0, seed=seed, verification="rejection"), prompt_ids=())
        verdict = verify(torch.from_numpy(p).log().expand(2, -1), draft, sampler, position=0, distributions=[q])
        counts[verdict.tokens[0]] += 1
    return chi_square(counts, p)


def test_a_drafter_may_sample_with_the_targets_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    statistic, limit = coupled_chi_square()
    assert statistic < limit

    def same_noise(seed: int, purpose: str, index: int = 0) -> int:
        return seed if purpose == "residual" else derived_seed(seed, purpose, index)

    monkeypatch.setattr(verify_module, "derived_seed", same_noise)
    statistic, limit = coupled_chi_square()
    assert statistic > limit, "the statistic would not have shown it"


EVERYTHING = SamplingParams(
    1.1,
    top_p=0.97,
    min_p=0.01,
    seed=6,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={2: 0.5},
    bad_words=((1, 2), (3, 3)),
    min_tokens=6,
)
VARIANTS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(0.9, seed=5),
    "all": EVERYTHING,
    "all, greedy": dataclasses.replace(EVERYTHING, temperature=0.0),
    "all, greedy, rejection": dataclasses.replace(EVERYTHING, temperature=0.0, verification="rejection"),
}
ENDS = frozenset([4])


def grammar(text: Sequence[int]) -> Bitmask | None:
    """Allow any token at even places, at odd ones those not equal to the last but for an end."""
    if len(text) % 2 == 0:
        return None
    return np.array([0b111111 & ~(1 << text[-1] & ~0b10000)], dtype=np.int32)


def grammar_behind(text: Sequence[int], draft: Sequence[int], k: int) -> Bitmask | None:
    return grammar([*text, *draft[:k]])


def text_by(params: SamplingParams, next_draft: Callable[[list[int]], list[int]], length: int = 12) -> list[int]:
    text: list[int] = []
    sampler = Sampler(params, prompt_ids=[3, 1], end_ids=ENDS)
    while len(text) < length and not ENDS & set(text):
        draft = next_draft(text)
        verdict = verify(
            TARGET.rows(text, draft),
            draft,
            sampler,
            position=2 + len(text),
            bitmask_at=partial(grammar_behind, text, draft),
        )
        assert verdict.tokens[: verdict.num_accepted] == tuple(draft[: verdict.num_accepted])
        assert verdict.has_bonus or verdict.tokens[-1] in ENDS
        sampler.advance(verdict.tokens)
        text += verdict.tokens
    return text[:length]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_text_for_a_seed_is_the_same_whatever_is_drafted(variant: str, data: st.DataObject) -> None:
    params = VARIANTS[variant]
    plain = text_by(params, lambda text: [])

    def next_draft(text: list[int]) -> list[int]:
        right = plain[len(text) :][: data.draw(st.integers(0, 4))]
        return right + data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))

    assert text_by(params, next_draft) == plain


@given(draft=st.lists(st.integers(0, VOCAB - 1), max_size=6), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_a_greedy_rejection_is_an_exact_verdict(draft: list[int], seed: int) -> None:
    rows = TARGET.rows([], draft)
    params = SamplingParams(seed=seed)
    exact = verify(rows, draft, Sampler(params, prompt_ids=()), position=0)
    rejecting = Sampler(dataclasses.replace(params, verification="rejection"), prompt_ids=())
    assert verify(rows, draft, rejecting, position=0) == exact


@given(draft=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_a_rejection_verdict_depends_on_seed_and_position_alone(draft: list[int], seed: int) -> None:
    params = SamplingParams(1.0, seed=seed, verification="rejection")
    distributions = [logits_of(9)[0].softmax(-1)] * len(draft)
    verdicts = set()
    for global_seed in range(3):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(global_seed)
            rows = TARGET.rows([], draft)
            sampler = Sampler(params, prompt_ids=())
            verdicts.add(verify(rows, draft, sampler, position=4, distributions=distributions))
    assert len(verdicts) == 1


@pytest.mark.parametrize("seed", range(20))
def test_what_the_target_is_sure_of_or_was_sampled_from_itself_is_accepted_whole(seed: int) -> None:
    params = SamplingParams(1.0, seed=seed, verification="rejection")
    draft = [1, 4, 2]
    rows = TARGET.rows([], draft)
    own: list[torch.Tensor | None] = [rows[k].softmax(-1) for k in range(3)]
    assert verify(rows, draft, Sampler(params, prompt_ids=()), position=0, distributions=own).num_accepted == 3
    only = [np.array([1 << token], dtype=np.int32) for token in (*draft, 5)]
    forced = verify(rows, draft, Sampler(params, prompt_ids=()), position=0, bitmask_at=lambda k: only[k])
    assert forced == Verdict((1, 4, 2, 5), 3)


@pytest.mark.parametrize("seed", range(20))
def test_a_drafted_token_the_grammar_forbids_is_always_rejected(seed: int) -> None:
    params = SamplingParams(1.0, seed=seed, verification="rejection")
    q = torch.tensor([0.0, 0.9, 0.0, 0.1, 0.0, 0.0])
    verdict = verify(
        TARGET.rows([], [1]),
        [1],
        Sampler(params, prompt_ids=()),
        position=0,
        bitmask_at=lambda _: np.array([0b101000], dtype=np.int32),
        distributions=[q],
    )
    assert verdict.num_accepted == 0
    assert verdict.tokens[0] in (3, 5)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, seed=4)], ids=str)
def test_verification_accepts_just_the_leading_draws(params: SamplingParams) -> None:
    logits = logits_of(3, rows=4)
    own = [draw(logits[k], params, position=10 + k) for k in range(4)]
    for wrong in range(4):
        draft = [(token + (k == wrong)) % VOCAB for k, token in enumerate(own[:3])]
        verdict = verify(logits, draft, Sampler(params, prompt_ids=()), position=10)
        assert verdict == Verdict(tuple(own[: wrong + 1]), wrong)
        assert verdict.has_bonus


@pytest.mark.parametrize("verification", ["exact", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.001])
def test_an_end_token_is_accepted_without_a_bonus_and_given_as_a_bonus(temperature: float, verification: Any) -> None:
    own = [3, 2, 5, 1]
    logits = torch.eye(VOCAB)[own]
    params = SamplingParams(temperature, verification=verification)
    sampler = Sampler(params, prompt_ids=(), end_ids=frozenset([2]))
    accepted = verify(logits, own[:3], sampler, position=0)
    assert (accepted.tokens, accepted.num_accepted, accepted.has_bonus) == ((3, 2), 2, False)
    bonus = verify(logits[:2], own[:1], sampler, position=0)
    assert (bonus.tokens, bonus.num_accepted, bonus.has_bonus) == ((3, 2), 1, True)


@pytest.mark.parametrize("verification", ["exact", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_row_is_masked_by_the_grammar_behind_its_draft(temperature: float, verification: Any) -> None:
    masks = [np.array([1 << token], dtype=np.int32) for token in (3, 2, 5)]
    sampler = Sampler(SamplingParams(temperature, verification=verification), prompt_ids=())
    verdict = verify(logits_of(0, rows=3), [3, 2], sampler, position=0, bitmask_at=lambda k: masks[k])
    assert verdict.tokens == (3, 2, 5)


@pytest.mark.parametrize("params", VARIANTS.values(), ids=VARIANTS)
def test_the_sampler_is_where_it_was(params: SamplingParams) -> None:
    sampler = Sampler(params, prompt_ids=[3], end_ids=ENDS, generated=[1, 1])
    before = sampler.process(logits_of(7)[0])
    verify(logits_of(8, rows=4), [0, 1, 2], sampler, position=3)
    assert torch.equal(sampler.process(logits_of(7)[0]), before)
    assert sampler.num_generated == 2


@pytest.mark.parametrize("verification", ["exact", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_number_is_an_error_once_it_is_reached(temperature: float, verification: Any) -> None:
    sampler = Sampler(SamplingParams(temperature, verification=verification), prompt_ids=())
    logits = torch.full((3, VOCAB), -50.0)
    logits[0, 1] = logits[1, 2] = 50.0
    logits[2, 3] = math.nan
    assert verify(logits, [1, 5], sampler, position=0).tokens == (1, 2)
    for draft in ([1, 2], [1, 2, 4]):  # the bonus's row, and a drafted token's
        with pytest.raises(CorruptModelError, match="position 2"):
            verify(logits[[0, 1, 2, 0][: len(draft) + 1]], draft, sampler, position=0)
    with pytest.raises(GrammarError):
        verify(logits, [1, 2], sampler, position=0, bitmask_at=lambda _: np.zeros(1, dtype=np.int32))


@pytest.mark.parametrize("num_top", [0, 2, 99])
@pytest.mark.parametrize("params", VARIANTS.values(), ids=VARIANTS)
def test_logprobs_are_the_raw_targets_for_accepted_tokens_and_the_bonus(params: SamplingParams, num_top: int) -> None:
    rows = logits_of(11, rows=4) * 4
    sampler = Sampler(params, prompt_ids=[3], end_ids=frozenset([5]))
    silent = verify(rows, [0, 1, 2], sampler, position=0)
    draft = [*silent.tokens, 0, 0, 0][:3]
    asked = Sampler(dataclasses.replace(params, top_logprobs=num_top), prompt_ids=[3], end_ids=frozenset([5]))
    verdict = verify(rows, draft, asked, position=0)
    assert silent.logprobs == ()
    assert verdict.num_accepted > 0
    assert [entry.token for entry in verdict.logprobs] == list(verdict.tokens)
    for row, entry in zip(rows.tolist(), verdict.logprobs, strict=False):
        total = math.log(sum(math.exp(value) for value in row))
        ranked = sorted(((value - total, token) for token, value in enumerate(row)), reverse=True)[:num_top]
        assert entry.logprob == pytest.approx(row[entry.token] - total, abs=1e-5)
        assert [token for token, _ in entry.top] == [token for _, token in ranked]
        assert [value for _, value in entry.top] == pytest.approx([value for value, _ in ranked], abs=1e-5)


def test_logprobs_of_half_precision_logits_are_computed_in_single_precision() -> None:
    logits = logits_of(0).bfloat16()
    assert token_logprobs(logits, [2], num_top=3) == token_logprobs(logits.float(), [2], num_top=3)


GOOD_Q = torch.tensor([0.5, 0.25, 0.25, 0.0, 0.0, 0.0])


def with_value(token: int, value: float) -> torch.Tensor:
    q = GOOD_Q.clone()
    q[token] = value
    return q


@pytest.mark.parametrize(
    ("draft", "distributions", "reason"),
    [
        ([0, 1], [GOOD_Q], "1 distributions for 2"),
        ([0], [GOOD_Q, None], "2 distributions for 1"),
        ([0], [GOOD_Q[:5]], "shape"),
        ([0], [GOOD_Q.unsqueeze(0)], "shape"),
        ([0], [with_value(1, math.nan)], "sums to nan"),
        ([0], [with_value(1, math.inf)], "sums to inf"),
        ([0], [with_value(1, 0.26)], "sums to 1.0"),
        ([0], [with_value(1, -0.25) * 2], "its least is -0.5"),
        ([1, 3], [None, GOOD_Q], "distribution 1 gives the drafted token 3 a probability of 0"),
        ([VOCAB], [GOOD_Q], "below 6"),
        ([-1], [GOOD_Q], "below 6"),
    ],
    ids=str,
)
def test_distributions_that_cannot_be_what_was_sampled_from_are_refused(
    draft: list[int], distributions: list[torch.Tensor | None], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check_distributions(draft, distributions, VOCAB)
    rows = logits_of(0, rows=len(draft) + 1)
    sampler = Sampler(SamplingParams(1.0, verification="rejection"), prompt_ids=())
    with pytest.raises(ValueError, match=reason):
        verify(rows, draft, sampler, position=0, distributions=distributions)
    for params in (SamplingParams(1.0), SamplingParams(verification="rejection")):
        verify(rows, draft, Sampler(params, prompt_ids=()), position=0, distributions=distributions)


def test_distributions_that_can_are_not() -> None:
    check_distributions([0, 1, 5], [GOOD_Q, GOOD_Q.double() * 1.0005, None], VOCAB)
    check_distributions([0, 1, 5], [], VOCAB)
    check_distributions([], [], VOCAB)
