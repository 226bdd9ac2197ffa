"""Texts decoded together are the texts they are alone, and nobody waits for, or suffers from, anybody else."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch

from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.hybrid import HybridDrafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.engine.attention import ROWWISE_MAX_ROWS
from dlite_agent.engine.decode import PREFILL_CHUNK, decode
from dlite_agent.engine.draft_length import AdaptiveLength, PassCost
from dlite_agent.engine.packed import Segment
from dlite_agent.engine.request import Request, Step
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.scheduler import Limits, Scheduler
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target, TargetOutput
from dlite_agent.errors import ConfigError, ContextLengthError, DLiteError, EngineBusyError
from dlite_agent.testing import ScriptedDrafter, random_dlite, tiny_target

PATIENCE = 60.0
LENGTH = 20


@pytest.fixture
def make() -> Iterator[Callable[..., Scheduler]]:
    """Make schedulers that are closed again, and leave no thread behind."""
    made: list[Scheduler] = []

    def scheduler(target: Target, **options: Any) -> Scheduler:
        made.append(Scheduler(target, name="test-engine", **options))
        return made[-1]

    yield scheduler
    for one in made:
        one.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "test-engine"]


def new_state(target: Target) -> TargetState:
    return TargetState(target.new_cache())


def text_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def text_alone(target: Target, request: Request) -> list[int]:
    return text_of(list(decode(target, new_state(target), NullDrafter(), request)))


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * (7 + seed)) % 150 for i in range(length)]


class Passes:
    """Records how many new rows each cache got in each pass of a target, in order."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[dict[int, int]] = []
        forward = target.forward_many

        def recording(segments: Sequence[Segment]) -> list[TargetOutput]:
            self.rows.append({id(segment.cache): segment.num_rows for segment in segments})
            self.before()
            return forward(segments)

        monkeypatch.setattr(target, "forward_many", recording)

    def before(self) -> None:
        """Is called before every pass."""


def all_at_once(calls: Sequence[Callable[[], list[Step]]]) -> list[list[Step]]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(call) for call in calls]]


def ragged(target: Target) -> list[tuple[Drafter, Request]]:
    """Requests that differ in everything: lengths, sampling, drafters, ends."""
    dlite = DLiteDrafter(random_dlite(target, group=2), target.embedding)
    drafters: list[Drafter] = [NullDrafter(), LookupDrafter(min_match=1), dlite, HybridDrafter(LookupDrafter(), dlite)]
    requests = []
    for index, length in enumerate((1, 3, 17, 31, 32, 33, 90, PREFILL_CHUNK + 5)):
        sampling = SamplingParams() if index % 2 else SamplingParams(temperature=0.9, seed=index)
        request = Request(
            prompt_of(length, seed=index),
            sampling=sampling,
            max_new_tokens=LENGTH + index,
            end_ids=frozenset([index]),
            max_draft=(0, 3, 7)[index % 3],
        )
        requests.append((drafters[index % 4], request))
    return requests


def test_texts_decoded_together_are_the_texts_they_are_alone(
    target: Target, make: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = ragged(target)
    alone = [text_of(list(decode(target, new_state(target), NullDrafter(), request))) for _, request in requests]
    passes, scheduler = Passes(target, monkeypatch), make(target)
    barrier = threading.Barrier(len(requests))

    def call(drafter: Drafter, request: Request) -> list[Step]:
        barrier.wait(PATIENCE)
        return list(scheduler.decode(new_state(target), drafter, request))

    steps = all_at_once([lambda d=drafter, r=request: call(d, r) for drafter, request in requests])  # type: ignore[misc]
    assert [text_of(one) for one in steps] == alone
    assert max(len(rows) for rows in passes.rows) > 2
    assert max(step.num_shared for one in steps for step in one) > 2


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_packed_pass_gives_each_session_what_it_gets_alone(quantize: Any) -> None:
    target = tiny_target("llama", quantize=quantize)
    lengths, news = (0, 5, 40, 200), (1, 4, 2, 9)
    packed: list[Segment] = []
    alone: list[Segment] = []
    expected = []
    for seed, (length, new) in enumerate(zip(lengths, news, strict=True)):
        ids = prompt_of(new, seed=seed + 10)
        for segments in (packed, alone):
            cache = target.new_cache()
            if length:
                target.forward(prompt_of(length, seed=seed), cache)
            segments.append(Segment(ids, cache, num_logits=new, num_features=min(new, 2)))
        expected.append(target.forward_many([alone[-1]])[0])
    for output, single, one, two in zip(target.forward_many(packed), expected, packed, alone, strict=True):
        tolerance = 0 if quantize else 1e-5
        assert (output.logits - single.logits).abs().max() <= tolerance
        assert (output.features - single.features).abs().max() <= tolerance
        rows = two.cache.num_rows
        assert one.cache.num_rows == rows
        assert (one.cache.rows(0, rows) - two.cache.rows(0, rows)).abs().max() <= tolerance


def test_a_failing_packed_pass_leaves_every_cache_where_it_was(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = []
    for seed in range(3):
        cache = llama.new_cache()
        llama.forward(prompt_of(9, seed=seed), cache)
        segments.append(Segment([1, 2, 3], cache))
    decoder: Any = llama.model.get_decoder()
    handle = decoder.layers[2].register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        llama.forward_many(segments)
    handle.remove()
    assert [segment.cache.num_rows for segment in segments] == [9, 9, 9]
    again = llama.forward_many(segments)
    fresh = llama.forward([*prompt_of(9, seed=1), 1, 2, 3], llama.new_cache())
    assert (again[1].logits - fresh.logits).abs().max() <= 1e-4


def test_a_long_prompt_holds_the_others_up_by_one_chunk(
    llama: Target, make: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlite_agent.engine.scheduler._LOOKAHEAD", 4000)  # a text whose caller lags would rightly wait
    target = tiny_target(max_position_embeddings=4096)
    passes, scheduler = Passes(target, monkeypatch), make(target)
    short, long = new_state(target), new_state(target)

    def until_the_long_prompt_is_there() -> None:
        while not any(text.decoding.state is long for text in scheduler._texts) and len(passes.rows) == 2:
            time.sleep(0.001)

    monkeypatch.setattr(passes, "before", until_the_long_prompt_is_there)
    steps = scheduler.decode(short, NullDrafter(), Request(prompt_of(8), max_new_tokens=4000))
    next(steps)
    list(scheduler.decode(long, NullDrafter(), Request(prompt_of(6 * PREFILL_CHUNK), max_new_tokens=2)))
    steps.close()
    chunks = [index for index, rows in enumerate(passes.rows) if rows.get(id(long.cache), 0) > ROWWISE_MAX_ROWS]
    assert len(chunks) == 6
    assert all(len(passes.rows[index]) == 1 for index in chunks)
    for before, after in pairwise(chunks):
        assert any(id(short.cache) in rows for rows in passes.rows[before + 1 : after])


def test_two_long_prompts_take_turns(make: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(max_position_embeddings=4096)
    passes, scheduler = Passes(target, monkeypatch), make(target)
    states = [new_state(target), new_state(target)]

    def until_both_are_there() -> None:
        while len(scheduler._texts) < 2 and len(passes.rows) < 3:
            pass

    monkeypatch.setattr(passes, "before", until_both_are_there)

    def call(index: int) -> list[Step]:
        request = Request(prompt_of(4 * PREFILL_CHUNK, seed=index), max_new_tokens=1)
        return list(scheduler.decode(states[index], NullDrafter(), request))

    all_at_once([lambda: call(0), lambda: call(1)])
    order = [next(iter(rows)) for rows in passes.rows]
    assert Counter(order) == {id(states[0].cache): 4, id(states[1].cache): 4}
    assert all(before != after for before, after in pairwise(order[1:7]))


def test_closing_an_iteration_stops_its_text_and_frees_its_state(llama: Target, make: Callable[..., Scheduler]) -> None:
    scheduler, state = make(llama), new_state(llama)
    steps = scheduler.decode(state, NullDrafter(), Request(prompt_of(5), max_new_tokens=400))
    given = [*next(steps).tokens, *next(steps).tokens]
    steps.close()
    held = state.ids.tolist()
    assert held[: 5 + len(given)] == prompt_of(5) + given
    assert len(held) <= 5 + len(given) + 3  # it may have been a little ahead, no more
    again = text_of(list(scheduler.decode(state, NullDrafter(), Request(prompt_of(5), max_new_tokens=9))))
    assert again == text_alone(llama, Request(prompt_of(5), max_new_tokens=9))


def test_a_cancelled_text_ends(llama: Target, make: Callable[..., Scheduler]) -> None:
    scheduler, cancelled = make(llama), threading.Event()
    request = Request(prompt_of(5), max_new_tokens=400, is_cancelled=cancelled.is_set)
    steps = scheduler.decode(new_state(llama), NullDrafter(), request)
    next(steps)
    cancelled.set()
    assert len(list(steps)) <= 3


def test_a_text_that_is_cancelled_while_it_waits_never_begins(llama: Target, make: Callable[..., Scheduler]) -> None:
    scheduler, cancelled, may_go_on = make(llama, limits=Limits(max_active=1)), threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        may_go_on.wait(PATIENCE)

    busy = Request(prompt_of(5), max_new_tokens=20, on_prefill=hold)
    waiting = Request(prompt_of(5), max_new_tokens=20, is_cancelled=cancelled.is_set)
    state = new_state(llama)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: list(scheduler.decode(new_state(llama), NullDrafter(), busy)))
        while len(scheduler._texts) < 1:
            pass
        second = pool.submit(lambda: list(scheduler.decode(state, NullDrafter(), waiting)))
        while len(scheduler._texts) < 2:
            pass
        cancelled.set()
        may_go_on.set()
        assert second.result(PATIENCE) == []
        assert len(text_of(first.result(PATIENCE))) == 20
    assert state.num_rows == 0


def test_a_slow_caller_waits_alone(llama: Target, make: Callable[..., Scheduler]) -> None:
    scheduler, slow_state = make(llama), new_state(llama)
    slow = scheduler.decode(slow_state, NullDrafter(), Request(prompt_of(5), max_new_tokens=300))
    next(slow)
    other = list(scheduler.decode(new_state(llama), NullDrafter(), Request(prompt_of(6), max_new_tokens=60)))
    assert len(text_of(other)) == 60
    assert len(slow_state.ids) <= 5 + 4  # not decoded ahead of its caller
    assert len(text_of(list(slow))) == 299


def test_more_texts_than_may_wait_are_refused(llama: Target, make: Callable[..., Scheduler]) -> None:
    scheduler = make(llama, limits=Limits(max_active=1, max_waiting=1))
    request = Request(prompt_of(5), max_new_tokens=60)
    taken_on = [scheduler.decode(new_state(llama), NullDrafter(), request) for _ in range(2)]
    first = [next(steps) for steps in taken_on]
    with pytest.raises(EngineBusyError, match="2 texts already"):
        next(scheduler.decode(new_state(llama), NullDrafter(), request))
    texts = [text_of([step, *steps]) for step, steps in zip(first, taken_on, strict=True)]
    assert texts == [text_alone(llama, request)] * 2


def test_a_text_whose_caller_pauses_keeps_no_place_from_others(llama: Target, make: Callable[..., Scheduler]) -> None:
    scheduler = make(llama, limits=Limits(max_active=2))
    request = Request(prompt_of(5), max_new_tokens=60)
    paused = [scheduler.decode(new_state(llama), NullDrafter(), request) for _ in range(3)]
    first = [next(one) for one in paused]  # the third finds both places taken by texts that nobody reads
    texts = [text_of([step, *one]) for step, one in zip(first, paused, strict=True)]
    assert texts == [text_alone(llama, request)] * 3


@pytest.mark.parametrize("limits", [{"max_active": 0}, {"max_waiting": -1}])
def test_limits_that_cannot_work_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="max_"):
        Limits(**limits)


def test_an_error_of_one_text_is_raised_in_its_caller_alone(llama: Target, make: Callable[..., Scheduler]) -> None:
    scheduler, barrier = make(llama), threading.Barrier(2)

    def fail(done: int, total: int) -> None:
        raise ValueError("the progress bar broke")

    def call(request: Request) -> list[Step]:
        barrier.wait(PATIENCE)
        return list(scheduler.decode(new_state(llama), NullDrafter(), request))

    good, bad = Request(prompt_of(5), max_new_tokens=30), Request(prompt_of(5), on_prefill=fail)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(call, good), pool.submit(call, bad)
        with pytest.raises(ValueError, match="progress bar"):
            second.result(PATIENCE)
        assert len(text_of(first.result(PATIENCE))) == 30


def test_an_error_as_a_text_is_asked_whether_it_is_cancelled_is_its_own(
    llama: Target, make: Callable[..., Scheduler]
) -> None:
    def fail() -> bool:
        raise ValueError("whom do you ask")

    scheduler = make(llama)
    good = scheduler.decode(new_state(llama), NullDrafter(), Request(prompt_of(5), max_new_tokens=30))
    next(good)
    with pytest.raises(ValueError, match="whom do you ask"):
        list(scheduler.decode(new_state(llama), NullDrafter(), Request(prompt_of(5), is_cancelled=fail)))
    assert len(text_of(list(good))) == 29


def test_a_state_that_is_being_decoded_is_refused(llama: Target, make: Callable[..., Scheduler]) -> None:
    scheduler, state = make(llama), new_state(llama)
    first = scheduler.decode(state, NullDrafter(), Request(prompt_of(5), max_new_tokens=30))
    next(first)
    with pytest.raises(DLiteError, match="being decoded"):
        next(scheduler.decode(state, NullDrafter(), Request(prompt_of(5))))
    assert len(text_of(list(first))) == 29


def test_a_closed_engine_lets_go_of_its_target() -> None:
    target = tiny_target()
    scheduler = Scheduler(target)
    list(scheduler.decode(new_state(target), NullDrafter(), Request(prompt_of(5), max_new_tokens=3)))
    scheduler.close()
    model = weakref.ref(target.model)
    del scheduler, target
    gc.collect()
    assert model() is None


def test_an_error_of_the_pass_ends_its_texts_and_the_engine_goes_on(
    llama: Target, make: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, state = make(llama), new_state(llama)
    with monkeypatch.context() as patched:
        patched.setattr(llama, "forward_many", lambda segments: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            next(scheduler.decode(state, NullDrafter(), Request(prompt_of(5))))
    steps = list(scheduler.decode(state, NullDrafter(), Request(prompt_of(5), max_new_tokens=4)))
    assert len(text_of(steps)) == 4


def test_a_prompt_that_is_too_long_is_refused_before_it_is_queued(
    llama: Target, make: Callable[..., Scheduler]
) -> None:
    with pytest.raises(ContextLengthError):
        next(make(llama).decode(new_state(llama), NullDrafter(), Request(prompt_of(600))))


def test_closing_the_engine_is_an_error_for_those_it_serves(llama: Target, make: Callable[..., Scheduler]) -> None:
    scheduler = make(llama, limits=Limits(max_active=1))
    request = Request(prompt_of(5), max_new_tokens=400)
    active = scheduler.decode(new_state(llama), NullDrafter(), request)
    next(active)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: list(scheduler.decode(new_state(llama), NullDrafter(), request)))
        while len(scheduler._texts) < 2:
            pass
        scheduler.close()
        with pytest.raises(DLiteError, match="closed while"):
            waiting.result(PATIENCE)
    with pytest.raises(DLiteError, match="closed while"):
        list(active)
    with pytest.raises(DLiteError, match="is closed"):
        next(scheduler.decode(new_state(llama), NullDrafter(), request))
    scheduler.close()


_FORK = """
import os, sys
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.engine.request import Request
from dlite_agent.engine.scheduler import Scheduler
from dlite_agent.engine.state import TargetState
from dlite_agent.errors import DLiteError
from dlite_agent.testing import tiny_target

target = tiny_target("llama")
scheduler = Scheduler(target)
def begin():
    steps = scheduler.decode(TargetState(target.new_cache()), NullDrafter(), Request([1, 2, 3], max_new_tokens=500))
    next(steps)
    return steps
def check_refused(call):
    try:
        call()
    except DLiteError as error:
        assert "spawn" in str(error), error
    else:
        raise AssertionError("it was not refused")

steps, closed = begin(), begin()
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
check_refused(lambda: next(steps))
check_refused(begin)
closed.close()
scheduler.close(timeout=1000)
sys.exit(3)
"""


def test_a_forked_child_is_told_and_waits_for_nothing() -> None:
    command = [sys.executable, "-c", _FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (3, "")


def test_adaptive_lengths_change_no_token_of_texts_decoded_together(
    llama: Target, make: Callable[..., Scheduler]
) -> None:
    scheduler = make(llama, planner=AdaptiveLength(PassCost({1: 1.0, 8: 1.2, 64: 2.0})))
    plain, calls = [], []
    for seed in range(6):
        request = Request(prompt_of(4 + seed, seed=seed), max_new_tokens=60, max_draft=12)
        plain.append(text_of(list(decode(llama, new_state(llama), NullDrafter(), request))))
        wrong = [token if i % (seed + 2) else 3 for i, token in enumerate(plain[-1])]
        script = ScriptedDrafter(wrong, start=len(request.prompt_ids))
        calls.append(lambda s=script, r=request: list(scheduler.decode(new_state(llama), s, r)))
    steps = all_at_once(calls)
    assert [text_of(one) for one in steps] == plain
    assert sum(step.num_proposed for one in steps for step in one) > 0


def test_copies_of_a_state_go_on_alone(llama: Target, make: Callable[..., Scheduler]) -> None:
    """One prefilled prompt, several continuations: what `n` choices are made of."""
    scheduler, first = make(llama), new_state(llama)
    prompt = prompt_of(40)
    list(scheduler.decode(first, NullDrafter(), Request(prompt, max_new_tokens=1)))
    copies = [first.copy(llama.new_cache()) for _ in range(3)]
    requests = [Request(prompt, sampling=SamplingParams(temperature=1.2, seed=s), max_new_tokens=12) for s in range(3)]
    calls = [
        lambda c=c, r=r: list(scheduler.decode(c, NullDrafter(), r)) for c, r in zip(copies, requests, strict=True)
    ]
    steps = all_at_once(calls)
    assert [one[0].num_reused for one in steps] == [39] * 3
    alone = [text_of(list(decode(llama, new_state(llama), NullDrafter(), r))) for r in requests]
    assert [text_of(one) for one in steps] == alone
    assert len({tuple(text) for text in alone}) > 1


def test_a_state_lives_on_the_engines_thread_without_gradients(llama: Target, make: Callable[..., Scheduler]) -> None:
    with torch.enable_grad():
        state = new_state(llama)
        list(make(llama).decode(state, NullDrafter(), Request(prompt_of(5), max_new_tokens=3)))
    assert state.pivot is not None
    assert not state.pivot.requires_grad
