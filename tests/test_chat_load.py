"""ChatDLite when callers go away, fail or crowd in: others notice nothing, and nothing goes on for nobody."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler

from dlite_agent import ChatDLite, Settings
from dlite_agent.bench.heartbeat import Delays, measure
from dlite_agent.runtime import close_all
from dlite_agent.testing import write_tiny_chat_model

LONG = 3000


class Broken(Exception):
    """What a caller's own code raises here."""


class BreaksOnToken(BaseCallbackHandler):
    raise_error = True

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        raise Broken


class BreaksOnTokenAsync(AsyncCallbackHandler):
    raise_error = True

    async def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        raise Broken


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatDLite]:
    folder = write_tiny_chat_model(tmp_path_factory.mktemp("model"))
    settings = Settings(home=tmp_path_factory.mktemp("home"), redis_url=None, threads=1, offline=True)
    yield ChatDLite(model=str(folder), settings=settings, drafter="null", max_tokens=24)
    close_all()


@pytest.fixture
def passes(model: ChatDLite, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sequences in each pass of the target."""
    sizes: list[int] = []
    forward = model.runtime.target.forward_many

    def counting(segments: Any) -> Any:
        sizes.append(len(segments))
        return forward(segments)

    monkeypatch.setattr(model.runtime.target, "forward_many", counting)
    return sizes


def is_idle(model: ChatDLite) -> bool:
    """Whether no session is in use."""
    return not model.runtime.keeper._in_use


def check_nothing_goes_on(model: ChatDLite, passes: list[int]) -> None:
    """A call of one token takes a prefill and a pass at most; whatever else ran would be counted, too."""
    assert is_idle(model)
    before = len(passes)
    model.invoke("hello", max_tokens=1)
    assert set(passes[before:]) == {1}
    assert len(passes) - before <= 2


def test_a_closed_stream_is_decoded_no_further_and_its_session_is_free(model: ChatDLite, passes: list[int]) -> None:
    stream: Any = model.stream("hello", max_tokens=LONG, session_id="closed")
    next(stream)
    stream.close()
    check_nothing_goes_on(model, passes)
    assert len(passes) < LONG / 2


def test_a_closed_asynchronous_stream_is_decoded_no_further(model: ChatDLite, passes: list[int]) -> None:
    async def first_only() -> None:
        stream: Any = model.astream("hello", max_tokens=LONG, session_id="closed")
        async for _ in stream:
            break
        await stream.aclose()
        while not is_idle(model):  # LangChain leaves the closing of what it iterates over to the loop
            await asyncio.sleep(0)
        check_nothing_goes_on(model, passes)

    asyncio.run(first_only())
    assert len(passes) < LONG / 2


def test_a_cancelled_call_is_decoded_no_further(model: ChatDLite, passes: list[int]) -> None:
    async def cancelled() -> None:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()
        told = model.model_copy(update={"on_prefill": lambda done, rows: loop.call_soon_threadsafe(begun.set)})
        task = asyncio.create_task(told.ainvoke("hello", max_tokens=LONG, session_id="cancelled"))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        check_nothing_goes_on(model, passes)

    asyncio.run(cancelled())
    assert len(passes) < LONG / 2


def test_an_error_in_a_callback_is_its_caller_s_alone(model: ChatDLite) -> None:
    expected = model.invoke("hello").content
    others: list[Any] = []

    def crowd() -> None:
        others.extend(model.invoke("hello").content for _ in range(3))

    running = threading.Thread(target=crowd)
    running.start()
    sync: Any = {"callbacks": [BreaksOnToken()]}
    asynchronous: Any = {"callbacks": [BreaksOnTokenAsync()]}
    streaming = model.model_copy(update={"streaming": True, "max_tokens": LONG})
    with pytest.raises(Broken):
        streaming.invoke("hello", sync)
    with pytest.raises(Broken):
        list(streaming.stream("hello", sync))
    with pytest.raises(Broken):
        asyncio.run(streaming.ainvoke("hello", asynchronous))
    running.join()
    assert others == [expected] * 3
    assert is_idle(model)
    assert model.invoke("hello").content == expected


def test_an_error_on_the_engine_s_own_thread_is_its_caller_s_alone(model: ChatDLite) -> None:
    def fail(done: int, rows: int) -> None:
        raise Broken

    expected = model.invoke("hello").content
    failing = model.model_copy(update={"on_prefill": fail})
    for _ in range(2):
        with pytest.raises(Broken):
            failing.invoke("hello", session_id="failing")
    assert is_idle(model)
    assert model.invoke("hello", session_id="failing").content == expected


_LEAVING = {
    "a task that streams": """
async def main():
    async for chunk in model.astream("hello"):
        sys.exit(3)
asyncio.run(main())
""",
    "a stream that was left": """
async def main():
    stream = model.astream("hello")
    await anext(stream)
    return stream
stream = asyncio.run(main())
sys.exit(3)
""",
    "a task that left a stream early": """
async def main():
    async for chunk in model.astream("hello"):
        return
for _ in range(3):
    asyncio.run(main())
sys.exit(3)
""",
    "a daemon thread that streams": """
begun = threading.Event()
def run():
    for chunk in model.stream("hello"):
        begun.set()
threading.Thread(target=run, daemon=True).start()
begun.wait()
sys.exit(3)
""",
    "a daemon thread with a loop of its own": """
begun = threading.Event()
async def main():
    async for chunk in model.astream("hello"):
        begun.set()
threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()
begun.wait()
sys.exit(3)
""",
    "a daemon thread that calls again and again": """
begun = threading.Event()
def run():
    while True:
        try:
            model.invoke("hello", max_tokens=1)
        except Exception as error:
            print(error, file=sys.stderr)
        begun.set()
threading.Thread(target=run, daemon=True).start()
begun.wait()
sys.exit(3)
""",
}

_LOADING = """
import sys, threading, time
from dlite_agent import ChatDLite, runtime
model = ChatDLite(model=sys.argv[1])
threading.Thread(target=model.warm_up, daemon=True).start()
while not runtime._loading.locked():
    time.sleep(0.001)
time.sleep(float(sys.argv[2]))
sys.exit(3)
"""

_FORK = """
import os, sys
from dlite_agent import ChatDLite
from dlite_agent.errors import DLiteError

def check_refused(call):
    try:
        call()
    except DLiteError as error:
        assert "spawn" in str(error), error
    else:
        raise AssertionError("it was not refused")

model = ChatDLite(model=sys.argv[1], max_tokens=3000)
"""

_FORKED = {
    "a parent that loaded nothing": """
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
assert model.invoke("hello", max_tokens=2).usage_metadata["output_tokens"] == 2
sys.exit(3)
""",
    "a parent that loaded": """
model.warm_up()
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
check_refused(lambda: model.invoke("hello"))
check_refused(lambda: ChatDLite(model=sys.argv[1]).invoke("hello"))
check_refused(lambda: ChatDLite(model=sys.argv[1]).warm_up())
sys.exit(3)
""",
    "an open stream": """
stream, closed = model.stream("hello"), model.stream("hello")
next(stream), next(closed)
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
check_refused(lambda: next(stream))
closed.close()
sys.exit(3)
""",
    "an open stream that is left to the exit": """
stream = model.stream("hello")
next(stream)
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
sys.exit(3)
""",
    "closing everything": """
from dlite_agent.runtime import close_all
stream = model.stream("hello")
next(stream)
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
close_all()
sys.exit(3)
""",
}


@pytest.mark.parametrize("leaving", _LEAVING.values(), ids=_LEAVING)
def test_leaving_while_something_decodes_is_clean(model: ChatDLite, leaving: str) -> None:
    code = f"""
import asyncio, sys, threading
from dlite_agent import ChatDLite
model = ChatDLite(model=sys.argv[1], max_tokens={LONG}, drafter="null")
{leaving}
"""
    assert outcome(code, model.model) == (3, "")


def outcome(code: str, *args: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a program; return its exit code and what it printed to stderr. It has long to end, but not a minute."""
    command = [sys.executable, "-c", code, *args]
    settings = os.environ | {"DLITE_THREADS": "1", "DLITE_OFFLINE": "1"} | (env or {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=settings)
    return done.returncode, done.stderr


@pytest.mark.parametrize("delay", ["0.1", "0.3", "0.6"])
def test_leaving_while_a_daemon_thread_loads_the_model_is_clean(model: ChatDLite, delay: str, tmp_path: Path) -> None:
    assert outcome(_LOADING, model.model, delay, env={"DLITE_HOME": str(tmp_path)}) == (3, "")


@pytest.mark.parametrize("child", _FORKED.values(), ids=_FORKED)
def test_a_forked_child_computes_or_is_told_and_ends(model: ChatDLite, child: str) -> None:
    assert outcome(_FORK + child, model.model) == (3, "")


def test_a_stream_left_early_is_decoded_no_further_and_its_session_is_reused(
    model: ChatDLite, passes: list[int]
) -> None:
    async def first_only() -> None:
        async for _ in model.astream("hello", max_tokens=LONG, session_id="left"):
            return

    asyncio.run(first_only())
    reply = model.invoke("hello", max_tokens=1, session_id="left")
    assert reply.response_metadata["dlite"]["stats"]["reused_ram"] > 0
    check_nothing_goes_on(model, passes)
    assert len(passes) < LONG / 2


def test_the_heartbeat_counts_every_tick_and_token(model: ChatDLite) -> None:
    beat = asyncio.run(measure(model, num_calls=3, idle_s=0.05))
    assert beat.idle.num_ticks > 0 and beat.decoding.num_ticks > 0
    assert beat.tokens_per_second > 0
    assert beat.decoding.median_ms <= beat.decoding.p99_ms <= beat.decoding.max_ms
    assert Delays.of([0.001] * 98 + [0.5, 0.25]) == Delays(100, 1.0, 250.0, 500.0)
