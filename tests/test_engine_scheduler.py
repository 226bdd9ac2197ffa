"""Jobs take turns on one thread; what goes wrong in one of them is nobody else's business."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from dlite_agent.engine.scheduler import Job, Scheduler
from dlite_agent.errors import DLiteError

PATIENCE = 30.0


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler("test-engine")
    yield scheduler
    scheduler.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "test-engine"]


class Caller:
    """Collects what is delivered to it."""

    def __init__(self, items: Callable[[Job[int]], Iterator[int]]) -> None:
        self.items: list[object] = []
        self.ending: tuple[str, object] | None = None
        self.ended = threading.Event()
        self.job = Job(items, self.deliver)

    def deliver(self, kind: str, value: object) -> None:
        assert self.ending is None
        if kind == "item":
            self.items.append(value)
        else:
            self.ending = (kind, value)
            self.ended.set()

    def wait(self) -> list[object]:
        assert self.ended.wait(PATIENCE)
        return self.items


def counting(count: int) -> Callable[[Job[int]], Iterator[int]]:
    return lambda job: iter(range(count))


def never(job: Job[int]) -> Iterator[int]:
    raise AssertionError("it began")


def gated(gate: threading.Event) -> Callable[[Job[int]], Iterator[int]]:
    """Hold the engine's thread until the gate opens, so that a test can queue jobs meanwhile."""

    def items(job: Job[int]) -> Iterator[int]:
        assert gate.wait(PATIENCE)
        yield 0

    return items


def test_a_job_delivers_its_items_in_order_and_then_that_it_is_done(scheduler: Scheduler) -> None:
    for count in (0, 1, 50):
        caller = Caller(counting(count))
        scheduler.submit(caller.job)
        assert caller.wait() == list(range(count))
        assert caller.ending == ("done", None)


def test_jobs_take_turns(scheduler: Scheduler) -> None:
    gate, order = threading.Event(), list[str]()

    def named(name: str, count: int) -> Callable[[Job[int]], Iterator[int]]:
        def items(job: Job[int]) -> Iterator[int]:
            for number in range(count):
                order.append(name)
                yield number

        return items

    callers = [Caller(gated(gate)), Caller(named("a", 4)), Caller(named("b", 2)), Caller(named("c", 4))]
    for caller in callers:
        scheduler.submit(caller.job)
    gate.set()
    for caller in callers:
        caller.wait()
    assert "".join(order) == "abcabcacac"


def test_a_cancelled_job_stops_within_one_step_and_is_closed(scheduler: Scheduler) -> None:
    closed = threading.Event()

    def endless(job: Job[int]) -> Iterator[int]:
        try:
            number = 0
            while True:
                if number == 3:
                    job.cancel()
                yield number
                number += 1
        finally:
            closed.set()

    caller = Caller(endless)
    scheduler.submit(caller.job)
    assert caller.wait() == [0, 1, 2, 3]
    assert caller.ending == ("done", None)
    assert closed.is_set()


def test_a_job_cancelled_before_its_turn_never_begins(scheduler: Scheduler) -> None:
    gate = threading.Event()
    first, second = Caller(gated(gate)), Caller(never)
    scheduler.submit(first.job)
    scheduler.submit(second.job)
    second.job.cancel()
    gate.set()
    assert second.wait() == []
    assert second.ending == ("done", None)


@pytest.mark.parametrize("error", [ValueError("at the third"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_an_error_of_a_job_is_delivered_to_its_caller_alone(scheduler: Scheduler, error: BaseException) -> None:
    def failing(job: Job[int]) -> Iterator[int]:
        yield 0
        yield 1
        raise error

    gate = threading.Event()
    callers = [Caller(gated(gate)), Caller(failing), Caller(counting(6))]
    for caller in callers:
        scheduler.submit(caller.job)
    gate.set()
    assert callers[1].wait() == [0, 1]
    assert callers[1].ending == ("failed", error)
    assert callers[2].wait() == list(range(6))


def test_an_error_before_the_first_item_is_delivered_too(scheduler: Scheduler) -> None:
    error = StopIteration()

    def failing(job: Job[int]) -> Iterator[int]:
        raise error

    caller = Caller(failing)
    scheduler.submit(caller.job)
    caller.wait()
    assert caller.ending == ("failed", error)


@pytest.mark.parametrize("error", [RuntimeError("the loop is closed"), StopIteration(), KeyboardInterrupt()])
@pytest.mark.parametrize("num_heard", [0, 2])
def test_a_caller_that_cannot_be_told_harms_no_one(
    scheduler: Scheduler, error: BaseException, num_heard: int, caplog: pytest.LogCaptureFixture
) -> None:
    heard, closed = list[str](), threading.Event()

    def items(job: Job[int]) -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            closed.set()

    def deliver(kind: str, value: object) -> None:
        if len(heard) == num_heard:
            raise error
        heard.append(kind)

    other = Caller(counting(20))
    scheduler.submit(Job(items, deliver))
    scheduler.submit(other.job)
    assert other.wait() == list(range(20))
    assert heard == ["item"] * num_heard
    assert closed.is_set()
    later = Caller(counting(2))
    scheduler.submit(later.job)
    assert later.wait() == [0, 1]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_an_error_as_a_cancelled_job_closes_is_delivered(scheduler: Scheduler) -> None:
    error = ValueError("in the finally")

    def items(job: Job[int]) -> Iterator[int]:
        try:
            yield 0
            job.cancel()
            yield 1
        finally:
            raise error

    caller = Caller(items)
    scheduler.submit(caller.job)
    assert caller.wait() == [0, 1]
    assert caller.ending == ("failed", error)


def test_closing_ends_every_job_and_refuses_new_ones() -> None:
    def endless(job: Job[int]) -> Iterator[int]:
        while True:
            yield 0

    scheduler = Scheduler("test-engine")
    callers = [Caller(endless) for _ in range(3)]
    for caller in callers:
        scheduler.submit(caller.job)
    scheduler.close()
    for caller in callers:
        assert caller.ended.is_set()
        assert caller.ending == ("done", None)
    assert not [thread for thread in threading.enumerate() if thread.name == "test-engine"]
    with pytest.raises(DLiteError, match="closed"):
        scheduler.submit(Caller(counting(1)).job)
    scheduler.close()


def test_a_scheduler_without_work_closes() -> None:
    Scheduler().close()


def test_a_job_may_close_the_scheduler_it_runs_on_and_those_queued_do_not_begin() -> None:
    scheduler = Scheduler("test-engine")

    def items(job: Job[int]) -> Iterator[int]:
        scheduler.close()
        yield 0
        yield 1

    gate = threading.Event()
    first, closing, queued = Caller(gated(gate)), Caller(items), Caller(never)
    for caller in (first, closing, queued):
        scheduler.submit(caller.job)
    gate.set()
    assert [caller.wait() for caller in (first, closing, queued)] == [[0], [0], []]
    assert [caller.ending for caller in (first, closing, queued)] == [("done", None)] * 3
    scheduler.close()


def test_callers_on_many_threads_get_their_own_items_from_one_thread(scheduler: Scheduler) -> None:
    workers, failures = set[int](), list[str]()

    def numbers(start: int) -> Callable[[Job[int]], Iterator[int]]:
        def items(job: Job[int]) -> Iterator[int]:
            for number in range(start, start + 10):
                workers.add(threading.get_ident())
                yield number

        return items

    def call_often(start: int) -> None:
        for round_ in range(20):
            caller = Caller(numbers(start + round_))
            scheduler.submit(caller.job)
            if caller.wait() != list(range(start + round_, start + round_ + 10)):
                failures.append(f"{start} {round_}: {caller.items}")

    threads = [threading.Thread(target=call_often, args=(1000 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert len(workers) == 1
    assert threading.get_ident() not in workers
