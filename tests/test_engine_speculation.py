"""Speculation changes how fast the text comes, never the text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import pytest

from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.hybrid import HybridDrafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.engine.decode import decode
from dlite_agent.engine.request import MAX_DRAFT, Request, Step
from dlite_agent.engine.sampling import SamplingParams, draw
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.errors import ConfigError
from dlite_agent.testing import ScriptedDrafter, TargetDrafter, random_dlite, tiny_target

PROMPTS = ((11,), tuple(range(3, 15)), (5, 6, 7, 8, 9) * 8)
LENGTH = 20
SEEDED = (
    SamplingParams(0.7, seed=1),
    SamplingParams(1.0, top_k=20, seed=2),
    SamplingParams(1.5, top_p=0.8, seed=3),
    SamplingParams(0.9, top_k=50, top_p=0.9, seed=2**63 + 5),
)


def steps_of(
    target: Target,
    prompt: Sequence[int],
    drafter: Drafter,
    *,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    max_new_tokens: int = LENGTH,
    max_draft: int = 7,
    end_ids: frozenset[int] = frozenset(),
) -> list[Step]:
    request = Request(prompt, sampling=sampling, max_new_tokens=max_new_tokens, max_draft=max_draft, end_ids=end_ids)
    return list(decode(target, TargetState(target.new_cache()), drafter, request))


def text_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@lru_cache(maxsize=64)
def plain_text(target: Target, prompt: tuple[int, ...], sampling: SamplingParams = SamplingParams()) -> list[int]:  # noqa: B008
    return text_of(steps_of(target, prompt, NullDrafter(), sampling=sampling))


def oracle(target: Target, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """Decode without the decode loop: every token from a whole forward pass over all tokens before it."""
    ids = list(prompt)
    for _ in range(LENGTH):
        ids.append(draw(target.forward(ids, target.new_cache()).logits[-1], sampling, position=len(ids)))
    return ids[len(prompt) :]


def wrong_at(tokens: Sequence[int], places: Callable[[int], bool], vocab_size: int) -> list[int]:
    return [(token + 1) % vocab_size if places(i) else token for i, token in enumerate(tokens)]


DRAFTERS: dict[str, Callable[[Target, Sequence[int], Sequence[int]], Drafter]] = {
    "lookup": lambda target, prompt, text: LookupDrafter(min_match=1),
    "dlite-1": lambda target, prompt, text: DLiteDrafter(random_dlite(target, group=1), target.embedding),
    "dlite-2": lambda target, prompt, text: DLiteDrafter(random_dlite(target, group=2), target.embedding),
    "hybrid": lambda target, prompt, text: HybridDrafter(
        LookupDrafter(), DLiteDrafter(random_dlite(target), target.embedding)
    ),
    "all wrong": lambda target, prompt, text: ScriptedDrafter(
        wrong_at(text, lambda i: True, target.vocab_size), start=len(prompt)
    ),
    "some wrong": lambda target, prompt, text: ScriptedDrafter(
        wrong_at(text, lambda i: i % 5 == 4, target.vocab_size), start=len(prompt)
    ),
    "right": lambda target, prompt, text: ScriptedDrafter(text, start=len(prompt)),
}


@pytest.mark.parametrize("sampling", [SamplingParams(), SEEDED[0]], ids=["greedy", "seeded"])
def test_plain_decoding_gives_what_whole_passes_give(target: Target, sampling: SamplingParams) -> None:
    for prompt in PROMPTS:
        assert plain_text(target, prompt, sampling) == oracle(target, prompt, sampling)


@pytest.mark.parametrize("name", DRAFTERS)
def test_speculative_text_is_the_plain_text(target: Target, name: str) -> None:
    for prompt in PROMPTS:
        plain = plain_text(target, prompt)
        steps = steps_of(target, prompt, DRAFTERS[name](target, prompt, plain))
        assert text_of(steps) == plain
        if name in ("some wrong", "right"):
            assert len(steps) < LENGTH  # or else nothing was speculated


def test_a_tied_embedding_and_a_long_way_past_the_window_change_nothing() -> None:
    target = tiny_target("gemma3_text", seed=3, tie_word_embeddings=True, num_hidden_layers=6, sliding_window=5)
    plain = text_of(steps_of(target, PROMPTS[2], NullDrafter(), max_new_tokens=60))
    script = ScriptedDrafter(wrong_at(plain, lambda i: i % 4 == 3, target.vocab_size), start=len(PROMPTS[2]))
    assert text_of(steps_of(target, PROMPTS[2], script, max_new_tokens=60)) == plain


@pytest.mark.parametrize("max_draft", [0, 1, 3, 7, 15])
@pytest.mark.parametrize("sampling", SEEDED, ids=str)
def test_the_text_of_a_seed_is_the_same_with_any_drafter_and_draft_length(
    llama: Target, sampling: SamplingParams, max_draft: int
) -> None:
    prompt = PROMPTS[1]
    plain = plain_text(llama, prompt, sampling)
    assert len(set(plain)) > LENGTH // 3
    for name in ("lookup", "dlite-2", "some wrong"):
        drafter = DRAFTERS[name](llama, prompt, plain)
        steps = steps_of(llama, prompt, drafter, sampling=sampling, max_draft=max_draft)
        assert text_of(steps) == plain, name


def test_the_text_of_a_seed_is_the_same_in_every_family(target: Target) -> None:
    for sampling in SEEDED:
        plain = plain_text(target, PROMPTS[2], sampling)
        drafter = DRAFTERS["some wrong"](target, PROMPTS[2], plain)
        assert text_of(steps_of(target, PROMPTS[2], drafter, sampling=sampling)) == plain


def test_other_seeds_give_other_texts(llama: Target) -> None:
    texts = {
        tuple(text_of(steps_of(llama, [1, 2], NullDrafter(), sampling=SamplingParams(1.0, seed=seed))))
        for seed in range(4)
    }
    assert len(texts) == 4


@pytest.mark.parametrize("max_draft", [1, 7, MAX_DRAFT])
@pytest.mark.parametrize("sampling", [SamplingParams(), SEEDED[3]], ids=str)
def test_drafts_that_are_the_targets_own_are_accepted_whole(
    llama: Target, sampling: SamplingParams, max_draft: int
) -> None:
    drafter = TargetDrafter(llama, sampling)
    first, *others = steps_of(llama, PROMPTS[1], drafter, sampling=sampling, max_draft=max_draft)
    assert first.sources == ("prefill",)
    assert len(others) == math.ceil((LENGTH - 1) / (max_draft + 1))
    for step in others:
        assert step.sources == ("target",) * step.num_proposed + ("bonus",)
    assert [step.num_proposed for step in others[:-1]] == [max_draft] * (len(others) - 1)
    assert sum(len(step.tokens) for step in others) == LENGTH - 1


def test_tau_is_accepted_plus_one_per_verification(llama: Target) -> None:
    plain = plain_text(llama, PROMPTS[1])
    # Drafted is [1, 4], [5, 8] and so on, of which places 3, 7, .. are wrong: two accepted and a bonus each time.
    script = ScriptedDrafter(wrong_at(plain, lambda i: i % 3 == 0, llama.vocab_size), start=len(PROMPTS[1]))
    _, *others = steps_of(llama, PROMPTS[1], script, max_new_tokens=19)
    assert [len(step.tokens) for step in others] == [3] * 6
    accepted = [sum(source == "scripted" for source in step.sources) for step in others]
    assert sum(a + 1 for a in accepted) / len(others) == 3.0


def test_an_accepted_end_token_ends_the_text_without_a_bonus(llama: Target) -> None:
    plain = plain_text(llama, PROMPTS[1])
    wanted = next(plain[: i + 1] for i in range(6, LENGTH) if plain[i] not in plain[:i])
    end = wanted[-1]
    for name, make in DRAFTERS.items():
        steps = steps_of(llama, PROMPTS[1], make(llama, PROMPTS[1], plain), end_ids=frozenset([end]))
        assert text_of(steps) == wanted, name
    steps = steps_of(llama, PROMPTS[1], ScriptedDrafter(plain, start=len(PROMPTS[1])), end_ids=frozenset([end]))
    assert steps[-1].sources == ("scripted",) * len(steps[-1].tokens)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7, 8, 9, 10])
def test_no_more_tokens_come_than_were_asked_for(llama: Target, max_new_tokens: int) -> None:
    plain = plain_text(llama, PROMPTS[1])
    script = ScriptedDrafter(plain, start=len(PROMPTS[1]))
    assert text_of(steps_of(llama, PROMPTS[1], script, max_new_tokens=max_new_tokens)) == plain[:max_new_tokens]


def test_the_models_last_position_is_used_and_none_behind_it() -> None:
    target = tiny_target("qwen3", max_position_embeddings=32)
    prompt = list(range(20))
    plain = text_of(steps_of(target, prompt, NullDrafter(), max_new_tokens=100))
    assert len(plain) == 12
    assert text_of(steps_of(target, prompt, TargetDrafter(target), max_new_tokens=100)) == plain


@pytest.mark.parametrize("field", [{"max_new_tokens": 0}, {"max_draft": -1}, {"max_draft": MAX_DRAFT + 1}])
def test_a_request_that_cannot_work_is_refused(field: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(field))):
        Request([1], **field)  # type: ignore[arg-type]


def test_many_prompts_give_the_plain_text(llama: Target) -> None:
    rng = np.random.default_rng(0)
    lookup = HybridDrafter(LookupDrafter(min_match=1), DLiteDrafter(random_dlite(llama, group=2), llama.embedding))
    for _ in range(15):
        alphabet = int(rng.integers(2, llama.vocab_size))
        prompt = rng.integers(0, alphabet, size=int(rng.integers(1, 60))).tolist()
        plain = text_of(steps_of(llama, prompt, NullDrafter(), max_new_tokens=10))
        assert text_of(steps_of(llama, prompt, lookup, max_new_tokens=10)) == plain
