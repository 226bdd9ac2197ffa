"""Each job runs on a thread of its own; what goes wrong in one of them is nobody else's business."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from dlite_agent.errors import DLiteError
from dlite_agent.jobs import CallerGone, Job, JobRunner

PATIENCE = 30.0


@pytest.fixture
def runner() -> Iterator[JobRunner]:
    runner = JobRunner("test-caller")
    yield runner
    runner.close()
    check_no_thread_is_left()


def check_no_thread_is_left() -> None:
    for thread in threading.enumerate():
        if thread.name == "test-caller":
            thread.join(PATIENCE)
            assert not thread.is_alive()


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


def test_a_job_delivers_its_items_in_order_and_then_that_it_is_done(runner: JobRunner) -> None:
    for count in (0, 1, 50):
        caller = Caller(counting(count))
        runner.submit(caller.job)
        assert caller.wait() == list(range(count))
        assert caller.ending == ("done", None)


def test_a_job_that_waits_holds_no_other_up(runner: JobRunner) -> None:
    gate = threading.Event()
    first, second = Caller(gated(gate)), Caller(counting(3))
    runner.submit(first.job)
    runner.submit(second.job)
    assert second.wait() == [0, 1, 2]
    gate.set()
    assert first.wait() == [0]


def test_a_cancelled_job_stops_within_one_step_and_is_closed(runner: JobRunner) -> None:
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
    runner.submit(caller.job)
    assert caller.wait() == [0, 1, 2, 3]
    assert caller.ending == ("done", None)
    assert closed.is_set()


def test_a_job_cancelled_before_it_starts_never_begins(runner: JobRunner) -> None:
    caller = Caller(never)
    caller.job.cancel()
    runner.submit(caller.job)
    assert caller.wait() == []
    assert caller.ending == ("done", None)


@pytest.mark.parametrize("error", [ValueError("at the third"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_an_error_of_a_job_is_delivered_to_its_caller_alone(runner: JobRunner, error: BaseException) -> None:
    def failing(job: Job[int]) -> Iterator[int]:
        yield 0
        yield 1
        raise error

    gate = threading.Event()
    callers = [Caller(gated(gate)), Caller(failing), Caller(counting(6))]
    for caller in callers:
        runner.submit(caller.job)
    gate.set()
    assert callers[1].wait() == [0, 1]
    assert callers[1].ending == ("failed", error)
    assert callers[2].wait() == list(range(6))


def test_an_error_before_the_first_item_is_delivered_too(runner: JobRunner) -> None:
    error = StopIteration()

    def failing(job: Job[int]) -> Iterator[int]:
        raise error

    caller = Caller(failing)
    runner.submit(caller.job)
    caller.wait()
    assert caller.ending == ("failed", error)


@pytest.mark.parametrize("error", [RuntimeError("the loop is closed"), StopIteration(), KeyboardInterrupt()])
@pytest.mark.parametrize("num_heard", [0, 2])
def test_a_caller_that_cannot_be_told_harms_no_one(
    runner: JobRunner, error: BaseException, num_heard: int, caplog: pytest.LogCaptureFixture
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

    other, job = Caller(counting(20)), Job(items, deliver)
    runner.submit(job)
    runner.submit(other.job)
    assert other.wait() == list(range(20))
    job.join(PATIENCE)
    assert heard == ["item"] * num_heard
    assert closed.is_set()
    later = Caller(counting(2))
    runner.submit(later.job)
    assert later.wait() == [0, 1]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_an_error_as_a_cancelled_job_closes_is_delivered(runner: JobRunner) -> None:
    error = ValueError("in the finally")

    def items(job: Job[int]) -> Iterator[int]:
        try:
            yield 0
            job.cancel()
            yield 1
        finally:
            raise error

    caller = Caller(items)
    runner.submit(caller.job)
    assert caller.wait() == [0, 1]
    assert caller.ending == ("failed", error)


def test_closing_ends_every_job_and_refuses_new_ones() -> None:
    def endless(job: Job[int]) -> Iterator[int]:
        while True:
            yield 0

    runner = JobRunner("test-caller")
    callers = [Caller(endless) for _ in range(3)]
    for caller in callers:
        runner.submit(caller.job)
    runner.close()
    for caller in callers:
        assert caller.ended.is_set()
        assert caller.ending is not None
        kind, error = caller.ending
        assert kind == "failed"  # what is cut short is no success
        assert isinstance(error, DLiteError)
    check_no_thread_is_left()
    with pytest.raises(DLiteError, match="closed"):
        runner.submit(Caller(counting(1)).job)
    runner.close()


def test_a_runner_without_work_closes() -> None:
    JobRunner().close()


def test_a_job_may_close_the_runner_it_runs_on() -> None:
    runner = JobRunner("test-caller")

    def items(job: Job[int]) -> Iterator[int]:
        runner.close()
        yield 0
        yield 1

    caller = Caller(items)
    runner.submit(caller.job)
    assert caller.wait() == [0]
    assert caller.ending is not None
    assert caller.ending[0] == "failed"


_FORK = """
import os, sys, threading
from dlite_agent.errors import DLiteError
from dlite_agent.jobs import Job, JobRunner

begun = threading.Event()
def endless(job):
    while True:
        begun.set()
        yield 0
def submit():
    job = Job(endless, lambda kind, value: None, max_pending=1)
    runner.submit(job)
    return job

runner = JobRunner()
job = submit()
begun.wait()
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
try:
    submit()
except DLiteError as error:
    assert "spawn" in str(error)
    job.cancel()
    job.join(1000)
    runner.close(timeout=1000)
    sys.exit(3)
"""


def test_a_forked_child_is_told_and_waits_for_nothing() -> None:
    command = [sys.executable, "-c", _FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (3, "")


def test_a_caller_that_says_it_has_gone_is_no_failure(runner: JobRunner, caplog: pytest.LogCaptureFixture) -> None:
    closed = threading.Event()

    def items(job: Job[int]) -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.set()

    def deliver(kind: str, value: object) -> None:
        raise CallerGone

    job = Job(items, deliver)
    runner.submit(job)
    job.join(PATIENCE)
    assert job.is_cancelled
    assert closed.is_set()
    assert caplog.records == []


def test_a_job_begins_once_the_cancelled_ones_of_its_key_have_ended(runner: JobRunner) -> None:
    gate, begun = threading.Event(), threading.Event()
    order = list[str]()

    def leaving(job: Job[int]) -> Iterator[int]:
        begun.set()
        assert gate.wait(PATIENCE)
        order.append("cancelled")
        yield 0

    def following(job: Job[int]) -> Iterator[int]:
        order.append("next")
        yield 0

    def nothing(kind: str, value: object) -> None:
        pass

    first, second, other = (Job(leaving, nothing, key="a"), Job(following, nothing, key="a"), Caller(counting(1)))
    runner.submit(first)
    assert begun.wait(PATIENCE)
    first.cancel()
    runner.submit(second)
    runner.submit(other.job)
    assert other.wait() == [0]
    gate.set()
    second.join(PATIENCE)
    assert order == ["cancelled", "next"]


def test_callers_on_many_threads_get_their_own_items(runner: JobRunner) -> None:
    failures = list[str]()

    def call_often(start: int) -> None:
        for round_ in range(20):
            caller = Caller(lambda job, first=start + round_: iter(range(first, first + 10)))  # type: ignore[misc]
            runner.submit(caller.job)
            if caller.wait() != list(range(start + round_, start + round_ + 10)):
                failures.append(f"{start} {round_}: {caller.items}")

    threads = [threading.Thread(target=call_often, args=(1000 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def test_a_job_waits_for_a_caller_that_is_behind_and_notices_that_it_has_gone(runner: JobRunner) -> None:
    made, ended = list[int](), threading.Event()

    def items(job: Job[int]) -> Iterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    def deliver(kind: str, value: object) -> None:
        if kind != "item":
            ended.set()

    job = Job(items, deliver, max_pending=3)
    runner.submit(job)
    job.join(0.3)
    assert len(made) == 4  # the fourth is not delivered
    job.taken()
    job.join(0.3)
    assert len(made) == 5
    job.cancel()
    assert ended.wait(PATIENCE)
    assert len(made) == 5
