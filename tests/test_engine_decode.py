"""However a decode ends, the state is whole: the tokens given, KV rows of a prefix of them, the last row's pivot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter, DraftView, Proposal
from dlite_agent.engine.decode import PREFILL_CHUNK, Request, Step, decode, resume
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.errors import ContextLengthError
from dlite_agent.testing import ScriptedDrafter, TargetDrafter, tiny_target

PROMPT = list(range(3, 15))
LENGTH = 24


def new_state(target: Target) -> TargetState:
    return TargetState(target.new_cache())


def text_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def collect(steps: Iterator[Step], given: list[int]) -> None:
    """Collect tokens, those before an error too."""
    for step in steps:
        given += step.tokens


def plain_text(target: Target, prompt: Sequence[int], *, max_new_tokens: int = LENGTH) -> list[int]:
    request = Request(prompt, max_new_tokens=max_new_tokens)
    return text_of(list(decode(target, new_state(target), NullDrafter(), request)))


def check_state(target: Target, state: TargetState, text: Sequence[int]) -> None:
    """Check a state against a fresh pass over its text, and that the next call does not notice its past."""
    assert state.ids.tolist() == list(text)
    layers: list[Any] = list(state.cache.layers)
    assert {layer.get_seq_length() for layer in layers} == {state.num_rows}
    assert state.num_rows <= len(text)
    if state.num_rows:
        cache = target.new_cache()
        fresh = target.forward(state.ids[: state.num_rows].tolist(), cache)
        assert (state.cache.rows(0, state.num_rows) - cache.rows(0, state.num_rows)).abs().max() <= 1e-4
        if state.pivot is not None:
            assert (state.pivot - fresh.features[-1]).abs().max() <= 1e-4
    prompt = [*text, 1, 2]
    steps = list(decode(target, state, NullDrafter(), Request(prompt, max_new_tokens=6)))
    assert text_of(steps) == plain_text(target, prompt, max_new_tokens=6)


@cache
def own_text(target: Target) -> list[int]:
    return plain_text(target, PROMPT)


class FailingDrafter:
    """Proposes its script until it has done so `num_proposals` times."""

    name = "failing"

    def __init__(self, script: ScriptedDrafter, num_proposals: int) -> None:
        self.script = script
        self.num_left = num_proposals

    def propose(self, view: DraftView) -> Proposal:
        if not self.num_left:
            raise RuntimeError("the drafter failed")
        self.num_left -= 1
        return self.script.propose(view)


def script_of(target: Target, *, wrong_every: int = 5) -> ScriptedDrafter:
    """The target's own tokens behind PROMPT, but for one in `wrong_every`."""
    text = own_text(target)
    wrong = [(t + 1) % target.vocab_size if i % wrong_every == wrong_every - 1 else t for i, t in enumerate(text)]
    return ScriptedDrafter(wrong, start=len(PROMPT))


def test_at_the_bound_all_rows_but_the_anchors_are_there(target: Target) -> None:
    for max_new_tokens in (1, 2, 9):
        state = new_state(target)
        request = Request(PROMPT, max_new_tokens=max_new_tokens)
        text = text_of(list(decode(target, state, script_of(target), request)))
        assert state.num_rows == len(state.ids) - 1
        assert state.pivot is not None
        check_state(target, state, PROMPT + text)


def test_an_end_token_inside_a_draft_becomes_the_anchor(target: Target) -> None:
    plain = own_text(target)
    fresh = next(i for i in range(3, LENGTH) if plain[i] not in plain[:i])
    request = Request(PROMPT, max_new_tokens=LENGTH, end_ids=frozenset([plain[fresh]]))
    state = new_state(target)
    steps = list(decode(target, state, ScriptedDrafter(plain, start=len(PROMPT)), request))
    assert text_of(steps) == plain[: fresh + 1]
    assert steps[-1].sources[-1] == "scripted"
    assert state.num_rows == len(state.ids) - 1
    assert state.pivot is not None
    check_state(target, state, PROMPT + plain[: fresh + 1])


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_a_closed_iteration_leaves_the_tokens_given(target: Target, num_steps: int) -> None:
    state, given = new_state(target), list[int]()
    steps = decode(target, state, script_of(target), Request(PROMPT, max_new_tokens=LENGTH))
    for _ in range(num_steps):
        given += next(steps).tokens
    steps.close()  # type: ignore[attr-defined]
    assert state.num_rows == len(state.ids) - 1
    check_state(target, state, PROMPT + given)


@pytest.mark.parametrize("num_proposals", [0, 1, 2])
def test_an_error_of_the_drafter_leaves_the_tokens_given(llama: Target, num_proposals: int) -> None:
    state, given = new_state(llama), list[int]()
    drafter = FailingDrafter(script_of(llama), num_proposals)
    with pytest.raises(RuntimeError, match="the drafter failed"):
        collect(decode(llama, state, drafter, Request(PROMPT, max_new_tokens=LENGTH)), given)
    assert len(given) > num_proposals
    check_state(llama, state, PROMPT + given)


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("num_passes", [0, 1, 3])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_of_the_target_leaves_the_tokens_given(
    num_passes: int, layer: int, error: type[BaseException]
) -> None:
    target = tiny_target()
    drafter, state, given, passes = script_of(target), new_state(target), list[int](), list[int]()

    def fail(*_: Any) -> None:
        if len(passes) == num_passes:
            raise error("the target failed")
        passes.append(layer)

    decoder: Any = target.model.get_decoder()
    handle = decoder.layers[layer].register_forward_hook(fail)
    with pytest.raises(error, match="the target failed"):
        collect(decode(target, state, drafter, Request(PROMPT, max_new_tokens=LENGTH)), given)
    handle.remove()
    assert state.num_rows == (0 if num_passes == 0 else len(PROMPT) + len(given) - 1)
    check_state(target, state, PROMPT + given if num_passes else [])


def test_an_error_in_verification_takes_back_the_drafts_rows(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no verdict")

    state = new_state(llama)
    steps = decode(llama, state, script_of(llama), Request(PROMPT, max_new_tokens=LENGTH))
    given = [*next(steps).tokens, *next(steps).tokens]
    with monkeypatch.context() as patched:
        patched.setattr("dlite_agent.engine.decode.verify", fail)
        with pytest.raises(RuntimeError, match="no verdict"):
            next(steps)
    assert state.num_rows == len(state.ids) - 1
    check_state(llama, state, PROMPT + given)


@pytest.mark.parametrize("asked_before", [0, 1, 2])
def test_a_cancelled_prefill_keeps_whole_chunks_and_the_next_call_uses_them(asked_before: int) -> None:
    target = tiny_target(num_hidden_layers=2, max_position_embeddings=2048)
    prompt = [i * 7 % 150 for i in range(2 * PREFILL_CHUNK + 20)]
    state, asked, told = new_state(target), list[int](), list[tuple[int, int]]()
    list(decode(target, state, NullDrafter(), Request(prompt[:5], max_new_tokens=1)))
    assert state.pivot is not None

    def is_cancelled() -> bool:
        asked.append(1)
        return len(asked) > asked_before

    request = Request(prompt, is_cancelled=is_cancelled, on_prefill=lambda done, total: told.append((done, total)))
    assert list(decode(target, state, NullDrafter(), request)) == []
    kept = 5 + asked_before * PREFILL_CHUNK
    assert told == [(n * PREFILL_CHUNK, len(prompt) - 5) for n in range(1, asked_before + 1)]
    assert (state.num_rows, state.ids.tolist()) == (kept, prompt[:kept])
    assert state.pivot is None
    (first,) = decode(target, state, NullDrafter(), Request(prompt, max_new_tokens=1))
    assert (first.num_reused, first.num_prefilled) == (kept, len(prompt) - kept)
    assert list(first.tokens) == plain_text(target, prompt, max_new_tokens=1)


def test_cancelling_ends_the_text_within_one_step(llama: Target) -> None:
    state, given = new_state(llama), list[Step]()
    request = Request(PROMPT, max_new_tokens=LENGTH, is_cancelled=lambda: len(given) >= 3)
    for step in decode(llama, state, script_of(llama), request):
        given.append(step)
    assert len(given) == 3
    check_state(llama, state, PROMPT + text_of(given))


def test_a_longer_prompt_prefills_only_what_is_new(target: Target) -> None:
    state = new_state(target)
    text = PROMPT + text_of(list(decode(target, state, script_of(target), Request(PROMPT, max_new_tokens=10))))
    longer = [*text, 40, 41, 42]
    first, *_ = steps = list(decode(target, state, NullDrafter(), Request(longer, max_new_tokens=8)))
    assert (first.num_reused, first.num_prefilled) == (len(text) - 1, 4)  # the anchor had no row yet
    assert text_of(steps) == plain_text(target, longer, max_new_tokens=8)


def test_the_same_prompt_prefills_one_row(target: Target) -> None:
    state = new_state(target)
    texts = []
    for expected in (len(PROMPT), 1, 1):
        first, *_ = steps = list(decode(target, state, NullDrafter(), Request(PROMPT, max_new_tokens=8)))
        assert (first.num_reused, first.num_prefilled) == (len(PROMPT) - expected, expected)
        texts.append(text_of(steps))
    assert texts[0] == texts[1] == texts[2] == plain_text(target, PROMPT, max_new_tokens=8)


@pytest.mark.parametrize("common", [0, 1, 7, 11])
def test_a_prompt_that_departs_reuses_what_is_common(target: Target, common: int) -> None:
    state = new_state(target)
    list(decode(target, state, NullDrafter(), Request(PROMPT, max_new_tokens=8)))
    other = PROMPT[:common] + [100 + i for i in range(9)]
    first, *_ = steps = list(decode(target, state, NullDrafter(), Request(other, max_new_tokens=8)))
    assert first.num_reused == common
    assert text_of(steps) == plain_text(target, other, max_new_tokens=8)
    check_state(target, state, other + text_of(steps))


def test_a_shorter_prompt_forgets_what_is_behind_it(target: Target) -> None:
    state = new_state(target)
    list(decode(target, state, NullDrafter(), Request(PROMPT, max_new_tokens=8)))
    first, *_ = steps = list(decode(target, state, NullDrafter(), Request(PROMPT[:5], max_new_tokens=8)))
    assert (first.num_reused, first.num_prefilled) == (4, 1)
    assert text_of(steps) == plain_text(target, PROMPT[:5], max_new_tokens=8)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.9, top_p=0.9, seed=8)], ids=str)
@pytest.mark.parametrize("cut", [1, 6])
def test_resuming_behind_a_stored_pivot_is_not_noticed(target: Target, sampling: SamplingParams, cut: int) -> None:
    """Rows, ids and pivot go to another state, as they do through the session store."""
    whole = text_of(
        list(decode(target, new_state(target), NullDrafter(), Request(PROMPT, sampling=sampling, max_new_tokens=16)))
    )
    before, after = new_state(target), new_state(target)
    drafter: Drafter = TargetDrafter(target, sampling)
    given = text_of(
        list(decode(target, before, drafter, Request(PROMPT, sampling=sampling, max_new_tokens=cut, max_draft=2)))
    )
    assert before.pivot is not None
    after.append(before.ids)
    after.cache.append(before.cache.rows(0, before.num_rows))
    after.pivot = before.pivot.clone()
    rest = Request([], sampling=sampling, max_new_tokens=16 - cut)
    steps = list(resume(target, after, drafter, rest))
    assert given + text_of(steps) == whole
    assert all(step.num_prefilled == 0 and "prefill" not in step.sources for step in steps)
    check_state(target, after, PROMPT + whole)


def test_resuming_at_the_models_last_position_gives_nothing() -> None:
    target = tiny_target(max_position_embeddings=16)
    state = new_state(target)
    assert len(text_of(list(decode(target, state, NullDrafter(), Request(PROMPT))))) == 4
    assert list(resume(target, state, NullDrafter(), Request([]))) == []


@pytest.mark.parametrize("length", [0, 16, 17, 40])
def test_a_prompt_that_leaves_no_room_is_refused_and_touches_nothing(length: int) -> None:
    target = tiny_target(max_position_embeddings=16)
    state = new_state(target)
    list(decode(target, state, NullDrafter(), Request([1, 2, 3], max_new_tokens=2)))
    before = state.ids.tolist(), state.num_rows
    with pytest.raises(ContextLengthError, match="prompt"):
        list(decode(target, state, NullDrafter(), Request([1] * length)))
    assert (state.ids.tolist(), state.num_rows) == before


def test_the_drafter_sees_the_text_the_room_and_the_last_rows_features(target: Target) -> None:
    views: list[tuple[list[int], int, torch.Tensor]] = []
    script = script_of(target)

    class Watching:
        name = "watching"

        def propose(self, view: DraftView) -> Proposal:
            assert view.pivot is not None
            views.append((view.ids.tolist(), view.max_tokens, view.pivot.clone()))
            return script.propose(view)

    steps = list(decode(target, new_state(target), Watching(), Request(PROMPT, max_new_tokens=LENGTH, max_draft=4)))
    text, seen = list(PROMPT), 0
    for step, view in zip(steps, [*views, None], strict=False):
        text += step.tokens
        seen += len(step.tokens)
        if view is None:
            break
        ids, room, pivot = view
        assert ids == text
        assert room == min(4, LENGTH - seen - 1)
        fresh = target.forward(text[:-1], target.new_cache()).features[-1]  # the row before the anchor
        assert (pivot - fresh).abs().max() <= 1e-4
    assert len(views) > 3


def test_more_than_asked_for_is_not_verified(llama: Target) -> None:
    class Talkative:
        name = "talkative"

        def propose(self, view: DraftView) -> Proposal:
            return Proposal([5] * 50, self.name)

    steps = list(decode(llama, new_state(llama), Talkative(), Request(PROMPT, max_new_tokens=9, max_draft=3)))
    assert max(step.num_proposed for step in steps) == 3
    assert text_of(steps) == plain_text(llama, PROMPT, max_new_tokens=9)


def test_what_is_drafted_behind_an_end_token_is_not_verified(llama: Target) -> None:
    plain = own_text(llama)
    end = next(token for token in range(150) if token not in plain)
    script = ScriptedDrafter([plain[0], plain[1], end, 5, 6, 7], start=len(PROMPT))
    request = Request(PROMPT, max_new_tokens=LENGTH, end_ids=frozenset([end]))
    _, second, *_ = steps = list(decode(llama, new_state(llama), script, request))
    assert (second.num_proposed, second.sources) == (2, ("scripted", "bonus"))
    assert text_of(steps) == plain


def test_a_draft_outside_the_vocabulary_is_an_error_that_leaves_the_state_whole(llama: Target) -> None:
    state, given = new_state(llama), list[int]()
    with pytest.raises(IndexError):
        collect(decode(llama, state, ScriptedDrafter([10**6], start=len(PROMPT) + 1), Request(PROMPT)), given)
    assert len(given) == 1
    check_state(llama, state, PROMPT + given)
