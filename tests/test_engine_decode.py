"""However a decode ends, the state is whole: the tokens given, KV rows of a prefix of them, the last row's pivot."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.hybrid import HybridDrafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter, DraftView, Proposal
from dlite_agent.engine.decode import PREFILL_CHUNK, decode, resume
from dlite_agent.engine.request import Request, Step
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.errors import ConfigError, ContextLengthError
from dlite_agent.testing import ScriptedDrafter, TargetDrafter, random_dlite, tiny_target

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


Fault = Callable[[list[Proposal]], Sequence[Proposal]]


def raising(proposals: list[Proposal]) -> Sequence[Proposal]:
    raise RuntimeError("the drafter failed")


def with_confidence(value: float) -> Fault:
    return lambda proposals: [Proposal([3, 4], "failing", [0.5, value])]


FAULTS: dict[str, Fault] = {
    "an exception": raising,
    "too many tokens": lambda proposals: [Proposal([5] * 50, "failing")],
    "an id that does not exist": lambda proposals: [Proposal([5, 10**6], "failing")],
    "a negative id": lambda proposals: [Proposal([-1], "failing")],
    "a bool": lambda proposals: [Proposal([True], "failing")],
    "nothing in place of a proposal": lambda proposals: [None],  # type: ignore[list-item]
    "text in place of a proposal": lambda proposals: ["abc"],  # type: ignore[list-item]
    "no tokens": lambda proposals: [Proposal(None, "failing")],  # type: ignore[arg-type]
    "a generator": lambda proposals: [Proposal((i for i in range(3)), "failing")],  # type: ignore[arg-type]
    "an array of confidences": lambda proposals: [Proposal([3, 4], "failing", np.array([0.5, 0.5]))],  # type: ignore[arg-type]
    "words for confidences": lambda proposals: [Proposal([3], "failing", ["a"])],  # type: ignore[list-item]
    "a list for a distribution": lambda proposals: [Proposal([3], "failing", [0.5], [[0.5] * 160])],  # type: ignore[list-item]
    "a list for a source": lambda proposals: [Proposal([3], ["failing"])],  # type: ignore[arg-type]
    "no id at all": lambda proposals: [Proposal([1.5], "failing")],  # type: ignore[list-item]
    "too few proposals": lambda proposals: [],
    "no proposals": lambda proposals: None,  # type: ignore[dict-item,return-value]
    "nan confidence": with_confidence(math.nan),
    "confidence above one": with_confidence(1.5),
    "confidence of another length": lambda proposals: [Proposal([3, 4], "failing", [0.5])],
    "nan distribution": lambda proposals: [Proposal([3], "failing", [0.5], [torch.full((160,), math.nan)])],
    "distribution of another size": lambda proposals: [Proposal([3], "failing", [0.5], [torch.ones(3) / 3])],
    "distribution without the token": lambda proposals: [Proposal([3], "failing", [0.5], [torch.eye(160)[4]])],
}


class FailingDrafter:
    """Proposes its script; at call number `num_proposals` it fails in some way."""

    name = "failing"

    def __init__(self, script: ScriptedDrafter, num_proposals: int, fail: Fault) -> None:
        self.script = script
        self.num_left = num_proposals
        self.fail = fail

    def propose(self, views: Sequence[DraftView]) -> Sequence[Proposal]:
        self.num_left -= 1
        proposals = self.script.propose(views)
        return self.fail(proposals) if self.num_left == -1 else proposals


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


@pytest.mark.parametrize("num_proposals", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_drafter_costs_one_draft_and_is_counted(
    llama: Target, fault: str, num_proposals: int, caplog: pytest.LogCaptureFixture
) -> None:
    state = new_state(llama)
    drafter = FailingDrafter(script_of(llama), num_proposals, FAULTS[fault])
    steps = list(decode(llama, state, drafter, Request(PROMPT, max_new_tokens=LENGTH)))
    assert text_of(steps) == own_text(llama)
    check_state(llama, state, PROMPT + own_text(llama))
    assert [step.num_faults for step in steps[1:]] == [int(k == num_proposals) for k in range(len(steps) - 1)]
    assert steps[1 + num_proposals].num_proposed == 0
    assert steps[2 + num_proposals].num_proposed > 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_drafter_that_never_works_is_warned_of_once(llama: Target, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        name = "broken"

        def propose(self, views: Sequence[DraftView]) -> Sequence[Proposal]:
            raise RuntimeError("it never works")

    steps = list(decode(llama, new_state(llama), Broken(), Request(PROMPT, max_new_tokens=LENGTH)))
    assert text_of(steps) == own_text(llama)
    assert sum(step.num_faults for step in steps) == LENGTH - 2  # not at the prefill, nor where one token was left
    assert [record.levelname for record in caplog.records] == ["WARNING"]


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
    check_state(target, state, PROMPT + given)


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
    assert (state.num_rows, state.ids.tolist()) == (kept, prompt)
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
    watched: list[tuple[list[int], int, torch.Tensor]] = []
    script = script_of(target)

    class Watching:
        name = "watching"

        def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
            for view in views:
                assert view.pivot is not None
                watched.append((view.ids.tolist(), view.max_tokens, view.pivot.clone()))
            return script.propose(views)

    steps = list(decode(target, new_state(target), Watching(), Request(PROMPT, max_new_tokens=LENGTH, max_draft=4)))
    text, seen = list(PROMPT), 0
    for step, view in zip(steps, [*watched, None], strict=False):
        text += step.tokens
        seen += len(step.tokens)
        if view is None:
            break
        ids, room, pivot = view
        assert ids == text
        assert room == min(4, LENGTH - seen - 1)
        fresh = target.forward(text[:-1], target.new_cache()).features[-1]  # the row before the anchor
        assert (pivot - fresh).abs().max() <= 1e-4
    assert len(watched) > 3


def test_what_is_drafted_behind_an_end_token_is_not_verified(llama: Target) -> None:
    plain = own_text(llama)
    end = next(token for token in range(150) if token not in plain)
    script = ScriptedDrafter([plain[0], plain[1], end, 5, 6, 7], start=len(PROMPT))
    request = Request(PROMPT, max_new_tokens=LENGTH, end_ids=frozenset([end]))
    _, second, *_ = steps = list(decode(llama, new_state(llama), script, request))
    assert (second.num_proposed, second.sources) == (2, ("scripted", "bonus"))
    assert text_of(steps) == plain


class Fingerprinting:
    """Digests all of a state before and after each proposal of another drafter."""

    def __init__(self, drafter: Drafter, state: TargetState) -> None:
        self.name = drafter.name
        self.drafter = drafter
        self.state = state
        self.num_compared = 0

    def digest(self) -> bytes:
        digest = hashlib.blake2b(self.state.ids.tobytes())
        digest.update(self.state.cache.rows(0, self.state.num_rows).numpy().tobytes())
        assert self.state.pivot is not None
        digest.update(self.state.pivot.numpy().tobytes())
        return digest.digest()

    def propose(self, views: Sequence[DraftView]) -> Sequence[Proposal]:
        before = self.digest()
        proposals = self.drafter.propose(views)
        assert self.digest() == before
        self.num_compared += 1
        return proposals


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafting_never_writes_the_targets_state(target: Target, temperature: float) -> None:
    state = new_state(target)
    dlite = DLiteDrafter(random_dlite(target, group=2), target.embedding)
    drafter = Fingerprinting(HybridDrafter(LookupDrafter(min_match=1), dlite), state)
    sampling = SamplingParams(temperature=temperature, seed=3)
    steps = list(decode(target, state, drafter, Request(PROMPT, sampling=sampling, max_new_tokens=LENGTH)))
    assert drafter.num_compared > 5
    assert sum(step.num_faults for step in steps) == 0


def test_a_drafter_that_tries_to_write_the_text_is_at_fault(llama: Target) -> None:
    class Writing:
        name = "writing"

        def propose(self, views: Sequence[DraftView]) -> Sequence[Proposal]:
            views[0].ids[0] = 1
            return [Proposal((), self.name)]

    state = new_state(llama)
    steps = list(decode(llama, state, Writing(), Request(PROMPT, max_new_tokens=5)))
    assert [step.num_faults for step in steps] == [0, 1, 1, 1, 0]
    check_state(llama, state, PROMPT + text_of(steps))


@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_a_sampled_draft_of_the_targets_own_distribution_is_mostly_accepted(llama: Target, verification: Any) -> None:
    """A drafter with the target's logits draws as it is told: under exact verification with the target's own noise."""

    class Twin:
        name = "twin"

        def propose(self, views: Sequence[DraftView]) -> Sequence[Proposal]:
            return [self.draft(view) for view in views]

        def draft(self, view: DraftView) -> Proposal:
            assert view.draw is not None
            cache, tokens, distributions = llama.new_cache(), list[int](), list[torch.Tensor]()
            pending = [*view.ids.tolist(), *view.drafted]
            for k in range(view.max_tokens):
                token, q = view.draw(llama.forward(pending, cache).logits[-1], k)
                tokens.append(token)
                pending = [token]
                distributions += [] if q is None else [q]
            return Proposal(tokens, self.name, (), distributions)

    sampling = SamplingParams(temperature=0.7, seed=5, verification=verification)
    request = Request(PROMPT, sampling=sampling, max_new_tokens=60, max_draft=3)
    steps = list(decode(llama, new_state(llama), Twin(), request))
    assert sum(step.num_faults for step in steps) == 0
    assert sum(len(step.tokens) for step in steps) / len(steps) > 3
    if verification == "exact":
        plain = list(decode(llama, new_state(llama), NullDrafter(), request))
        assert text_of(steps) == text_of(plain)


@pytest.mark.parametrize("prompt", [[1, 160], [1, -2, 3], [1, 2**40]])
def test_a_prompt_with_ids_that_do_not_exist_is_refused_and_touches_nothing(llama: Target, prompt: list[int]) -> None:
    state = new_state(llama)
    list(decode(llama, state, NullDrafter(), Request([1, 2, 3], max_new_tokens=2)))
    before = state.ids.tolist()
    with pytest.raises(ConfigError, match=r"token id (160|-2|1099511627776); expected ids 0\.\.159"):
        list(decode(llama, state, NullDrafter(), Request(prompt)))
    assert state.ids.tolist() == before


@pytest.mark.parametrize("prompt", [[1.5], ["a"], [2**70]], ids=str)
def test_a_prompt_of_anything_but_ids_is_refused(llama: Target, prompt: Any) -> None:
    with pytest.raises(ConfigError, match="expected token ids"):
        list(decode(llama, new_state(llama), NullDrafter(), Request(prompt)))
