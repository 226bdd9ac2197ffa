"""Draws follow the target's distribution and depend on seed, position and logits alone."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dlite_agent.engine.sampling import (
    SamplingParams,
    apply_bitmask,
    argmax_tokens,
    choice_params,
    derived_seed,
    distribution,
    draw,
    gumbel_noise,
    kept_tokens,
)
from dlite_agent.errors import ConfigError, CorruptModelError, GrammarError

VOCAB = 12
DRAWS = 3000
SHAPES = (
    SamplingParams(0.7),
    SamplingParams(1.0, top_k=5),
    SamplingParams(1.3, top_p=0.8),
    SamplingParams(0.7, top_k=6, top_p=0.9),
    SamplingParams(1.5, min_p=0.2),
    SamplingParams(1.5, top_k=9, top_p=0.95, min_p=0.1),
)


def logits_of(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 1.5


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return dataclasses.replace(params, seed=seed)


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
    kept = [i for i in kept if weights[i] >= params.min_p * max(weights)]
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


def test_a_mask_that_allows_nothing_is_an_error_and_not_token_0() -> None:
    nothing = np.array([0, -1], dtype=np.int32)  # the bits set are beyond the vocabulary
    for params in (SamplingParams(), SamplingParams(1.0)):
        with pytest.raises(GrammarError, match="allows none of the 12 tokens"):
            draw(logits_of(0), params, position=0, bitmask=nothing)


def test_allowed_tokens_the_target_finds_impossible_are_an_error() -> None:
    logits = logits_of(0)
    logits[[2, 3]] = -torch.inf
    for params in (SamplingParams(), *SHAPES):
        assert draw(logits, params, position=0, bitmask=np.array([0b1100100], dtype=np.int32)) in (5, 6)
        with pytest.raises(GrammarError, match="probability of 0"):
            draw(logits, params, position=0, bitmask=np.array([0b1100], dtype=np.int32))


@pytest.mark.parametrize("params", [SamplingParams(), *SHAPES], ids=str)
def test_logits_that_are_not_numbers_are_an_error(params: SamplingParams) -> None:
    logits = logits_of(0)
    logits[7] = math.nan
    with pytest.raises(CorruptModelError, match="position 31 hold NaN"):
        draw(logits, params, position=31)


def test_batched_argmax_is_each_rows_first_largest_and_tells_rows_without_one() -> None:
    logits = torch.randint(0, 4, (50, VOCAB), generator=torch.Generator().manual_seed(0)).float()  # full of ties
    assert argmax_tokens(logits) == [row.index(max(row)) for row in logits.tolist()]
    logits[3, 5], logits[4] = math.nan, -math.inf
    assert [k for k, token in enumerate(argmax_tokens(logits)) if token == -1] == [3, 4]


@pytest.mark.parametrize("vocab", [50, 5000])
def test_filters_are_those_of_transformers(vocab: int) -> None:
    ids = torch.zeros(1, 1, dtype=torch.long)
    for seed in range(30):
        params = SamplingParams(
            (0.4, 1.0, 2.5)[seed % 3],
            top_k=(0, 7, 2000)[seed // 3 % 3],
            top_p=(1.0, 0.9, 0.99)[seed // 9 % 3],
            min_p=0.01,
        )
        logits = logits_of(seed, vocab)
        scores = logits.double().unsqueeze(0)
        warpers: list[Any] = [TemperatureLogitsWarper(params.temperature)]
        warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
        warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1.0 else []
        for warper in [*warpers, MinPLogitsWarper(params.min_p)]:
            scores = warper(ids, scores)
        assert torch.allclose(distribution(logits, params), scores[0].softmax(-1), atol=1e-12)


def test_equally_likely_tokens_are_kept_from_the_lowest_id_on() -> None:
    logits = torch.zeros(4000)
    logits[3000] = 1.0
    for params in (SamplingParams(1.0, top_k=3), SamplingParams(1.0, top_p=4.6 / 4000)):
        assert kept_tokens(logits, params)[0].tolist() == [3000, 0, 1]
    half = kept_tokens(logits, SamplingParams(1.0, top_p=0.5))[0].tolist()
    assert half == [3000, *range(len(half) - 1)]
    assert 1990 < len(half) < 2010


@pytest.mark.parametrize("params", SHAPES, ids=str)
def test_masked_tokens_are_not_among_the_kept(params: SamplingParams) -> None:
    logits = logits_of(5)
    logits[2:] = -torch.inf
    assert set(kept_tokens(logits, params)[0].tolist()) <= (
        {0, 1} if params.top_k or params.top_p < 1 else set(range(VOCAB))
    )
    assert distribution(logits, params)[2:].eq(0).all()
    assert distribution(logits, params).sum().isclose(torch.tensor(1.0, dtype=torch.float64))


def test_a_temperature_near_zero_is_the_argmax() -> None:
    for temperature in (1e-300, 5e-324):
        assert draw(logits_of(0), SamplingParams(temperature, top_p=0.9), position=2) == int(logits_of(0).argmax())


def test_a_greedy_distribution_is_a_point_mass() -> None:
    assert distribution(logits_of(0), SamplingParams()).nonzero().tolist() == [[int(logits_of(0).argmax())]]


def test_half_precision_logits_are_drawn_from_like_their_values() -> None:
    logits = logits_of(0).bfloat16()
    for params in (SamplingParams(), *SHAPES):
        assert draw(logits, params, position=3) == draw(logits.double(), params, position=3)


def test_each_choice_has_its_own_seed_and_the_first_is_the_single_ones() -> None:
    params = SamplingParams(0.8, seed=-3, bad_words=((4, 5),), logit_bias={3: 1.0})
    choices = [choice_params(params, index) for index in range(200)]
    assert choices[0] == params
    assert len({choice.seed for choice in choices}) == 200
    assert choices == [choice_params(params, index) for index in range(200)]
    assert all(dataclasses.replace(choice, seed=-3) == params for choice in choices)
    others = {choice_params(with_seed(params, seed), index).seed for seed in range(50) for index in range(1, 50)}
    assert len(others) == 50 * 49
    with pytest.raises(ConfigError, match="-1"):
        choice_params(params, -1)


def test_derived_seeds_differ_by_purpose_and_fit_a_signed_64_bit_number() -> None:
    seeds = {derived_seed(seed, purpose, 1) for seed in range(100) for purpose in ("choice", "acceptance", "residual")}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_parameters_can_be_hashed_stored_and_are_no_view_of_what_they_were_made_from() -> None:
    bias, words = {3: 1.5}, [[1, 2], [3]]
    params = SamplingParams(0.5, logit_bias=bias, bad_words=words)  # type: ignore[arg-type]
    bias[4] = 1.0
    words[0].append(9)
    assert params == SamplingParams(0.5, logit_bias={3: 1.5}, bad_words=((1, 2), (3,)))
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    "field",
    [{"temperature": value} for value in (-0.1, math.inf, math.nan)]
    + [{"top_p": value} for value in (0.0, 1.1, math.nan)]
    + [{"min_p": value} for value in (-0.1, 1.1, math.nan)]
    + [{"repetition_penalty": value} for value in (0.0, -1.0, math.inf, math.nan)]
    + [{name: value} for name in ("presence_penalty", "frequency_penalty") for value in (math.inf, math.nan)]
    + [{"logit_bias": value} for value in ({3: math.inf}, {3: -math.inf}, {3: math.nan}, {-1: 1.0})]
    + [{"bad_words": value} for value in (((),), ((1,), ()), ((1, -2),))]
    + [{"top_k": -1}, {"min_tokens": -1}, {"top_logprobs": -1}, {"verification": "typical"}]
    + [{"top_k": 1.5}, {"seed": "x"}, {"min_tokens": 0.5}],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(field))} is .*; expected "):
        SamplingParams(**field)


@pytest.mark.parametrize("field", [{"temperature": "a"}, {"bad_words": ("ab",)}, {"logit_bias": 3}], ids=str)
def test_a_setting_of_another_type_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="another type"):
        SamplingParams(**field)
