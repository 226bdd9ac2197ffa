"""The queue behind background commits: in order, bounded, waited for, and no error lost."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from dlite_agent.commit_queue import CommitQueue


def note(ran: list[tuple[int, int]], number: int) -> None:
    ran.append((number, threading.get_ident()))


def test_commits_run_in_order_on_one_other_thread() -> None:
    queue, ran = CommitQueue(), list[tuple[int, int]]()
    for number in range(50):
        queue.submit(str(number % 3), 1, partial(note, ran, number))
    assert queue.drain()
    assert [number for number, _ in ran] == list(range(50))
    threads = {thread for _, thread in ran}
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    queue.close()


def test_waiting_for_one_session_does_not_wait_for_another_behind_it() -> None:
    queue, gate, ran = CommitQueue(), threading.Event(), list[str]()

    def wait_and_note() -> None:
        gate.wait()
        ran.append("b")

    queue.submit("a", 1, lambda: ran.append("a"))
    queue.submit("b", 1, wait_and_note)
    queue.wait("a")
    queue.wait("never seen")
    assert ran == ["a"]
    assert not queue.drain(timeout=0)
    gate.set()
    queue.wait("b")
    assert ran == ["a", "b"]
    queue.close()


def test_a_commit_waits_for_room_and_a_large_one_for_an_empty_queue() -> None:
    queue, gates, taken = CommitQueue(max_bytes=10), [threading.Event() for _ in range(3)], list[str]()

    def submit(name: str, num_bytes: int, gate: threading.Event) -> None:
        queue.submit(name, num_bytes, gate.wait)
        taken.append(name)

    submit("a", 6, gates[0])
    others = [
        threading.Thread(target=submit, args=("b", 5, gates[1])),
        threading.Thread(target=submit, args=("c", 100, gates[2])),
    ]
    others[0].start()
    others[0].join(0.1)
    assert taken == ["a"]
    gates[0].set()
    others[0].join()
    assert taken == ["a", "b"]
    others[1].start()
    others[1].join(0.1)
    assert taken == ["a", "b"]
    gates[1].set()
    others[1].join()
    assert taken == ["a", "b", "c"]
    gates[2].set()
    queue.close()


def test_an_error_reaches_its_session_s_next_call_and_no_other() -> None:
    queue, ran = CommitQueue(), list[str]()

    def fail() -> None:
        raise ZeroDivisionError("mine")

    queue.submit("a", 1, fail)
    queue.submit("b", 1, lambda: ran.append("b"))
    queue.wait("b")
    assert ran == ["b"]
    with pytest.raises(ZeroDivisionError, match="mine"):
        queue.wait("a")
    queue.wait("a")
    queue.close()


def test_closing_runs_what_waits_and_later_commits_run_at_once() -> None:
    queue, ran = CommitQueue(), list[tuple[int, int]]()
    for number in range(10):
        queue.submit("a", 1, partial(note, ran, number))
    queue.close()
    assert [number for number, _ in ran] == list(range(10))
    queue.submit("a", 1, partial(note, ran, 10))
    assert ran[-1] == (10, threading.get_ident())


def test_a_closed_queue_holds_nothing_and_has_no_thread() -> None:
    class Rows:
        def __init__(self) -> None:
            self.freed = freed

        def __del__(self) -> None:
            time.sleep(0.2)
            self.freed.append(True)

    freed: list[bool] = []
    queue = CommitQueue()
    queue.submit("a", 1, partial(lambda rows: None, Rows()))
    queue.close()
    assert freed == [True]  # an exit may not come between: freeing tensors runs torch


def test_a_close_that_cannot_wait_says_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    queue, gate = CommitQueue(), threading.Event()
    queue.submit("a", 1, gate.wait)
    queue.close(timeout=0)
    assert "not stored" in caplog.text
    gate.set()
    assert queue.drain()


def test_nothing_is_kept_of_sessions_that_do_not_come_back() -> None:
    queue = CommitQueue()
    for number in range(100):
        queue.submit(f"session {number}", 1, lambda: None)
    assert queue.drain()
    assert not queue._waiting
    queue.close()


_FORK = """
import os, sys, threading
from dlite_agent.commit_queue import CommitQueue

go_on = threading.Event()
queue = CommitQueue()
queue.submit("a", 1, go_on.wait)
if os.fork():
    child = os.waitstatus_to_exitcode(os.wait()[1])
    go_on.set()
    sys.exit(child)
sys.exit(3)
"""


def test_a_forked_child_does_not_wait_for_its_parent_s_commits() -> None:
    command = [sys.executable, "-c", _FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (3, "")
