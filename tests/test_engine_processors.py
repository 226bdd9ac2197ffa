"""What the text so far does to the logits, against transformers' processors where it has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from dlite_agent.bitmask import Bitmask
from dlite_agent.engine.processors import Sampler
from dlite_agent.engine.sampling import SamplingParams, draw
from dlite_agent.errors import ConfigError, CorruptModelError, GrammarError

VOCAB = 12
PROMPT = (3, 7, 7, 1)
END = frozenset([0, 11])
EVERYTHING = SamplingParams(
    1.0,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=-0.3,
    logit_bias={2: 1.7, 5: -3.0},
    bad_words=((4,), (7, 1, 8), (1, 9), (6, 6)),
    min_tokens=5,
)
SWITCHES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_tokens")
tokens = st.integers(0, VOCAB - 1)


def logits_of(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2.0


def mask_of(*allowed: int) -> Bitmask:
    return np.array([sum(1 << token for token in allowed)], dtype=np.int32)


def sampler_of(params: SamplingParams, generated: Sequence[int] = ()) -> Sampler:
    return Sampler(params, prompt_ids=PROMPT, end_ids=END, generated=generated)


def survivors(logits: torch.Tensor) -> set[int]:
    return {token for token, value in enumerate(logits.tolist()) if value > -torch.inf}


@given(prompt=st.lists(tokens, max_size=6), generated=st.lists(tokens, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("which", ["repetition_penalty", "bad_words", "logit_bias", "min_tokens"])
def test_each_processor_does_what_transformers_does(
    which: str, prompt: list[int], generated: list[int], seed: int
) -> None:
    value = getattr(EVERYTHING, which)
    theirs: dict[str, Any] = {
        "repetition_penalty": lambda: RepetitionPenaltyLogitsProcessor(value),
        "bad_words": lambda: NoBadWordsLogitsProcessor([list(word) for word in value]),
        "logit_bias": lambda: SequenceBiasLogitsProcessor([[[token], bias] for token, bias in value.items()]),
        "min_tokens": lambda: MinNewTokensLengthLogitsProcessor(len(prompt), value, sorted(END)),
    }
    text = torch.tensor([[*prompt, *generated]], dtype=torch.long)
    expected = theirs[which]()(text, logits_of(seed).unsqueeze(0))[0]
    ours = Sampler(SamplingParams(**{which: value}), prompt_ids=prompt, end_ids=END, generated=generated)
    assert torch.equal(ours.process(logits_of(seed)), expected)


@given(generated=st.lists(tokens, max_size=12), presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
@settings(max_examples=60, deadline=None)
def test_presence_and_frequency_count_generated_tokens_only(
    generated: list[int], presence: float, frequency: float
) -> None:
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    processed = sampler_of(params, generated).process(logits_of(0))
    expected = [
        value - presence * (token in generated) - frequency * generated.count(token)
        for token, value in enumerate(logits_of(0).tolist())
    ]
    assert torch.allclose(processed, torch.tensor(expected), atol=1e-5)


@given(
    generated=st.lists(tokens, max_size=8),
    drafted=st.lists(tokens, max_size=8),
    cuts=st.lists(st.integers(0, 8), max_size=3),
    allowed=st.none() | st.sets(tokens, min_size=1),
)
@settings(max_examples=200, deadline=None)
def test_drafted_tokens_weigh_to_the_bit_what_they_weigh_as_text(
    generated: list[int], drafted: list[int], cuts: list[int], allowed: set[int] | None
) -> None:
    """However the text came about: given at once, in pieces with draws between them, or drafted."""
    bitmask = None if allowed is None else mask_of(*allowed)
    sampler = sampler_of(EVERYTHING, generated)
    ahead = sampler.process(logits_of(1), drafted, bitmask=bitmask)
    assert torch.equal(ahead, sampler.process(logits_of(1), drafted, bitmask=bitmask)), "the draft left a trace"
    at_once = sampler_of(EVERYTHING, generated + drafted).process(logits_of(1), bitmask=bitmask)
    bounds = sorted({0, *(min(cut, len(drafted)) for cut in cuts), len(drafted)})
    for start, stop in pairwise(bounds):
        sampler.process(logits_of(2))
        sampler.advance(drafted[start:stop])
    assert torch.equal(sampler.process(logits_of(1), bitmask=bitmask), at_once)
    assert torch.equal(ahead, at_once)
    assert sampler.num_generated == len(generated) + len(drafted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("which", ["everything", *SWITCHES])
def test_the_callers_logits_stay_as_they_are(which: str, dtype: torch.dtype) -> None:
    params = EVERYTHING if which == "everything" else SamplingParams(**{which: getattr(EVERYTHING, which)})
    for bitmask in (None, mask_of(1, 2, 3)):
        rows = torch.stack([logits_of(seed) for seed in range(3)]).to(dtype)
        before = rows.clone()
        processed = sampler_of(params, [1, 2]).process(rows[1], [5], bitmask=bitmask)
        assert not torch.equal(processed.double(), rows[1].double())
        assert torch.equal(rows, before)


def test_nothing_switched_on_gives_the_callers_own_tensor() -> None:
    logits = logits_of(0)
    assert sampler_of(SamplingParams(1.0, top_p=0.9)).process(logits, [1, 2]) is logits
    long_enough = sampler_of(SamplingParams(min_tokens=2), [1, 2])
    assert not long_enough.is_active
    assert long_enough.process(logits) is logits
    assert not Sampler(SamplingParams(min_tokens=2), prompt_ids=PROMPT).is_active
    for name in SWITCHES:
        assert sampler_of(SamplingParams(**{name: getattr(EVERYTHING, name)})).is_active


def test_half_precision_logits_are_penalised_in_single_precision() -> None:
    logits = logits_of(0).bfloat16()
    params = dataclasses.replace(EVERYTHING, frequency_penalty=1e-4)
    assert torch.equal(sampler_of(params, [5, 5]).process(logits), sampler_of(params, [5, 5]).process(logits.float()))


def test_a_bad_word_is_never_completed_across_prompt_text_and_draft() -> None:
    params = SamplingParams(bad_words=((7, 1, 8), (4,)))
    assert survivors(sampler_of(params).process(logits_of(0))) == set(range(VOCAB)) - {4, 8}
    assert survivors(sampler_of(params, [7]).process(logits_of(0), [1])) == set(range(VOCAB)) - {4, 8}
    assert survivors(sampler_of(params, [7, 2]).process(logits_of(0), [1])) == set(range(VOCAB)) - {4}
    short = Sampler(params, prompt_ids=[1])
    assert survivors(short.process(logits_of(0))) == set(range(VOCAB)) - {4}


def test_a_drawn_text_never_holds_a_bad_word_nor_ends_early() -> None:
    params = SamplingParams(1.5, bad_words=((4,), (1, 9), (6, 6)), min_tokens=40, seed=5)
    sampler = sampler_of(params)
    text: list[int] = []
    for position in range(60):
        text.append(sampler.draw(torch.zeros(VOCAB), position=position))
        sampler.advance(text[-1:])
    pairs = set(pairwise(text))
    assert 4 not in text and not pairs & {(1, 9), (6, 6)}
    assert {1, 9, 6} <= set(text), "the text was too short to show anything"
    assert not END & set(text[:40]) and END & set(text[40:])


@pytest.mark.parametrize(
    ("allowed", "left"),
    [
        ({4, 8, 0, 2}, {2}),
        ({4, 8}, {4, 8}),  # only bad words
        ({0}, {0}),  # only an end
        ({0, 11, 4}, {0, 11}),  # ends and a bad word: an early end is the lesser evil
        ({2, 3}, {2, 3}),
    ],
    ids=lambda tokens: str(sorted(tokens)),  # a set may be written in another order by another worker
)
def test_the_grammar_wins_over_what_would_leave_nothing(allowed: set[int], left: set[int]) -> None:
    sampler = sampler_of(SamplingParams(bad_words=((4,), (7, 1, 8)), min_tokens=3))
    for logits in (logits_of(0), logits_of(1)):
        assert survivors(sampler.process(logits, bitmask=mask_of(*allowed))) == left


def test_an_end_that_is_a_bad_word_too_stays_possible_where_the_grammar_allows_nothing_else() -> None:
    sampler = sampler_of(SamplingParams(bad_words=((0,), (4,)), min_tokens=3))
    assert survivors(sampler.process(logits_of(0), bitmask=mask_of(0))) == {0}
    assert survivors(sampler.process(logits_of(0), bitmask=mask_of(0, 4))) == {4}


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0), EVERYTHING], ids=["plain", "seeded", "all"])
def test_a_grammar_that_allows_nothing_is_an_error(params: SamplingParams) -> None:
    with pytest.raises(GrammarError, match="allows none"):
        sampler_of(params).draw(logits_of(0), position=0, bitmask=mask_of())


def test_bad_words_that_forbid_everything_are_an_error() -> None:
    params = SamplingParams(bad_words=tuple((token,) for token in range(VOCAB) if token not in END), min_tokens=1)
    with pytest.raises(ConfigError, match="forbid every token"):
        sampler_of(params).draw(logits_of(0), position=0)
    assert sampler_of(params, [5]).draw(logits_of(0), position=0) in END


def test_the_model_is_blamed_for_logits_that_are_not_numbers() -> None:
    logits = logits_of(0)
    logits[6] = torch.nan
    for params in (SamplingParams(), EVERYTHING):
        with pytest.raises(CorruptModelError):
            sampler_of(params).draw(logits, position=0)


@pytest.mark.parametrize("field", [{"logit_bias": {VOCAB: 1.0}}, {"bad_words": ((1, VOCAB),)}], ids=str)
def test_ids_beyond_the_vocabulary_are_refused_when_it_is_known(field: dict[str, Any]) -> None:
    sampler = sampler_of(SamplingParams(**field))
    with pytest.raises(ConfigError, match=rf"{next(iter(field))} has token id 12; expected ids below 12"):
        sampler.process(logits_of(0))
    assert sampler.process(logits_of(0, VOCAB + 1)).shape == (VOCAB + 1,)


def test_end_ids_beyond_the_vocabulary_cannot_come_and_do_no_harm() -> None:
    sampler = Sampler(SamplingParams(min_tokens=1), prompt_ids=PROMPT, end_ids=frozenset([1, 500]))
    assert survivors(sampler.process(logits_of(0))) == set(range(VOCAB)) - {1}


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.8, top_p=0.9, seed=3)], ids=str)
def test_a_draw_is_that_from_the_processed_logits(params: SamplingParams) -> None:
    params = dataclasses.replace(EVERYTHING, temperature=params.temperature, top_p=params.top_p, seed=params.seed)
    drawn, plain = [], []
    for seed in range(40):
        sampler = sampler_of(params, [5, 6])
        token = sampler.draw(logits_of(seed), position=seed, drafted=[1], bitmask=mask_of(*range(9)))
        processed = sampler.process(logits_of(seed), [1], bitmask=mask_of(*range(9)))
        assert token == draw(processed, params, position=seed)
        drawn.append(token)
        plain.append(draw(logits_of(seed), params, position=seed))
    assert drawn != plain
    assert not {4, 9, 10, 11, 0} & set(drawn)


def test_a_numpy_prompt_is_fine() -> None:
    prompt: Any = np.array(PROMPT, dtype=np.int32)
    ours = Sampler(EVERYTHING, prompt_ids=prompt, end_ids=END).process(logits_of(0))
    assert torch.equal(ours, sampler_of(EVERYTHING).process(logits_of(0)))
