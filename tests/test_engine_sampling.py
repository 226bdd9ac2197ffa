"""Draws follow the target's distribution and depend on seed, position and logits alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dlite_agent.engine.sampling import SamplingParams, apply_bitmask, draw, gumbel_noise, kept_tokens
from dlite_agent.engine.verify import verify
from dlite_agent.errors import ConfigError

VOCAB = 12
DRAWS = 3000
SHAPES = (
    SamplingParams(0.7),
    SamplingParams(1.0, top_k=5),
    SamplingParams(1.3, top_p=0.8),
    SamplingParams(0.7, top_k=6, top_p=0.9),
)


def logits_of(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 1.5


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(params.temperature, params.top_k, params.top_p, seed)


def probabilities(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """The target distribution, token by token in plain Python."""
    weights = [math.exp(value / params.temperature) for value in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    order = order[: params.top_k or len(order)]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        if mass >= params.top_p:
            break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


def chi_square_limit(degrees: int) -> float:
    """The value that chance exceeds once in about 30,000 times (Wilson and Hilferty)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.0 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("params", SHAPES, ids=str)
def test_frequencies_over_positions_are_the_targets(params: SamplingParams) -> None:
    logits = logits_of(0)
    expected = probabilities(logits, params)
    counts = np.zeros(VOCAB)
    for position in range(DRAWS):
        counts[draw(logits, with_seed(params, 17), position=position)] += 1
    assert all(counts[i] == 0 for i in range(VOCAB) if expected[i] == 0.0)
    kept = [i for i in range(VOCAB) if expected[i] > 0.0]
    assert len(kept) > 2
    statistic = sum((counts[i] - DRAWS * expected[i]) ** 2 / (DRAWS * expected[i]) for i in kept)
    assert statistic < chi_square_limit(len(kept) - 1)


def test_frequencies_over_seeds_are_the_targets() -> None:
    logits, params = logits_of(1), SamplingParams(1.0)
    expected = probabilities(logits, params)
    counts = np.zeros(VOCAB)
    for seed in range(DRAWS):
        counts[draw(logits, with_seed(params, seed), position=3)] += 1
    statistic = sum((counts[i] - DRAWS * expected[i]) ** 2 / (DRAWS * expected[i]) for i in range(VOCAB))
    assert statistic < chi_square_limit(VOCAB - 1)


def test_neighbouring_positions_are_independent() -> None:
    logits, params = torch.zeros(2), SamplingParams(1.0, seed=5)
    bits = np.array([draw(logits, params, position=position) for position in range(DRAWS)])
    for lag in (1, 2, 7):
        agreeing = (bits[lag:] == bits[:-lag]).mean()
        assert abs(agreeing - 0.5) < 4 * 0.5 / math.sqrt(DRAWS - lag)


def test_the_noise_is_standard_gumbel() -> None:
    noise = torch.cat([gumbel_noise(torch.arange(1000), seed=9, position=position) for position in range(20)])
    ordered = noise.sort().values
    distribution = torch.exp(-torch.exp(-ordered))
    steps = (torch.arange(len(noise)) + 0.5) / len(noise)
    assert (distribution - steps).abs().max() < 2.2 / math.sqrt(len(noise))  # Kolmogorov and Smirnov, p < 1e-4
    assert len(set(noise.tolist())) == len(noise)


def test_the_noise_of_a_token_does_not_depend_on_the_others_asked_for() -> None:
    whole = gumbel_noise(torch.arange(300), seed=3, position=11)
    ids = torch.tensor([299, 0, 7, 7, 130])
    assert torch.equal(gumbel_noise(ids, seed=3, position=11), whole[ids])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_works_and_names_its_own_noise(seed: int) -> None:
    ids = torch.arange(50)
    noise = gumbel_noise(ids, seed=seed, position=4)
    assert noise.isfinite().all()
    assert torch.equal(noise, gumbel_noise(ids, seed=seed, position=4))
    assert not torch.isclose(noise, gumbel_noise(ids, seed=seed ^ 1, position=4)).any()
    assert not torch.isclose(noise, gumbel_noise(ids, seed=seed, position=5)).any()


def _unshift(value: int, shift: int) -> int:
    """Invert `x ^ (x >> shift)` on 64 bits."""
    result = value
    for _ in range(64 // shift):
        result = value ^ (result >> shift)
    return result


def test_the_largest_hash_gives_finite_noise() -> None:
    """The id whose hash is all ones is computed by inverting SplitMix64; its uniform number must not round up to 1."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
        return value ^ (value >> 31)

    def unmix(value: int) -> int:
        value = _unshift(value, 31) * pow(0x94D049BB133111EB, -1, 2**64) & mask
        value = _unshift(value, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
        return _unshift(value, 30)

    assert unmix(mix(12345)) == 12345
    for bits in (mask, 0):
        base = mix(mix(golden))  # seed 0, position 0
        token = ((unmix(bits) - base) * pow(golden, -1, 2**64) - 1) & mask
        signed = token - 2**64 if token >> 63 else token
        noise = gumbel_noise(torch.tensor([signed]), seed=0, position=0)
        assert noise.isfinite().all()
        assert abs(float(noise)) > 3.5  # it is an extreme, so the inversion above is right


def test_greedy_takes_the_argmax_whatever_the_position() -> None:
    for seed in range(20):
        logits = logits_of(seed)
        assert {draw(logits, SamplingParams(), position=p) for p in range(5)} == {int(logits.argmax())}


@pytest.mark.parametrize("params", SHAPES, ids=str)
def test_kept_tokens_are_the_distributions_support(params: SamplingParams) -> None:
    for seed in range(20):
        logits = logits_of(seed)
        ids, log_p = kept_tokens(logits, params)
        expected = probabilities(logits, params)
        assert set(ids.tolist()) == {i for i in range(VOCAB) if expected[i] > 0.0}
        assert torch.allclose(log_p.softmax(-1), torch.tensor([expected[i] for i in ids.tolist()], dtype=torch.float64))


def test_top_p_keeps_one_token_at_least_and_top_k_may_exceed_the_vocabulary() -> None:
    logits = logits_of(2)
    assert kept_tokens(logits, SamplingParams(1.0, top_p=1e-9))[0].tolist() == [int(logits.argmax())]
    assert len(kept_tokens(logits, SamplingParams(1.0, top_k=1000))[0]) == VOCAB


@pytest.mark.parametrize("params", [SamplingParams(), *SHAPES], ids=str)
def test_a_masked_token_is_never_drawn(params: SamplingParams) -> None:
    bitmask = np.array([0b0000_0000_0101_0100], dtype=np.int32)
    drawn = {draw(logits_of(seed), with_seed(params, seed), position=seed, bitmask=bitmask) for seed in range(300)}
    assert drawn <= {2, 4, 6}
    assert len(drawn) == 3


def test_bits_beyond_the_logits_are_ignored_and_missing_ones_forbid() -> None:
    logits = torch.zeros(40)
    short = apply_bitmask(logits, np.array([-1], dtype=np.int32))
    assert (short == 0).tolist() == [True] * 32 + [False] * 8
    long = apply_bitmask(logits, np.array([0, 1 << 7, -1], dtype=np.int32))
    assert (long == 0).nonzero().flatten().tolist() == [39]


@pytest.mark.parametrize(
    "field",
    [{"temperature": -0.1}, {"temperature": math.inf}, {"temperature": math.nan}, {"top_k": -1}]
    + [{"top_p": value} for value in (0.0, 1.1, math.nan)],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused(field: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(field))):
        SamplingParams(**field)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, seed=4)], ids=str)
def test_verification_accepts_just_the_leading_draws(params: SamplingParams) -> None:
    logits = torch.stack([logits_of(seed) for seed in range(4)])
    own = [draw(logits[k], params, position=10 + k) for k in range(4)]
    for wrong in range(4):
        draft = [(token + (k == wrong)) % VOCAB for k, token in enumerate(own[:3])]
        verdict = verify(logits, draft, params, position=10)
        assert verdict.num_accepted == wrong
        assert verdict.tokens == tuple(own[: wrong + 1])
        assert verdict.has_bonus


def test_an_end_token_is_accepted_without_a_bonus_and_given_as_a_bonus() -> None:
    own = [3, 8, 5, 1]
    logits = torch.eye(VOCAB)[own]
    accepted = verify(logits, own[:3], SamplingParams(), position=0, end_ids=frozenset([own[1]]))
    assert (accepted.tokens, accepted.num_accepted, accepted.has_bonus) == (tuple(own[:2]), 2, False)
    bonus = verify(logits[:2], own[:1], SamplingParams(), position=0, end_ids=frozenset([own[1]]))
    assert (bonus.tokens, bonus.num_accepted, bonus.has_bonus) == (tuple(own[:2]), 1, True)


def test_each_row_is_masked_by_the_grammar_behind_its_draft() -> None:
    logits = torch.stack([logits_of(seed) for seed in range(3)])
    masks = [np.array([1 << token], dtype=np.int32) for token in (3, 8, 5)]
    verdict = verify(logits, [3, 8], SamplingParams(), position=0, bitmask_at=lambda k: masks[k])
    assert verdict.tokens == (3, 8, 5)
