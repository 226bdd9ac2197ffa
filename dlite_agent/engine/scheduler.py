"""Many callers, one set of weights: one thread runs the target, and one pass of it serves every text that is decoded.

Each caller iterates over its own `Step`s, in any thread. Between two passes the engine's thread takes in new texts,
drops those that were cancelled, and runs

* one prefill chunk of the text that has waited longest for one, so that a long prompt holds the others up by no more
  than a chunk, and
* one packed pass over all other texts: their drafts are verified together, each with its own acceptance.

A caller may lag `_LOOKAHEAD` steps behind; then its text waits, and gives up its place to others until it is asked for
again. What goes wrong with one text is raised in its caller alone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from dataclasses import dataclass
from itertools import count, islice

from dlite_agent import lifetime
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.engine.decode import Decoding, run_pass
from dlite_agent.engine.draft_length import FixedLength, Planner
from dlite_agent.engine.request import Request, Step
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.errors import ConfigError, DLiteError, EngineBusyError

_LOOKAHEAD = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a scheduler takes on.

    Attributes:
        max_active: Texts decoded at once; more wait for their turn, first come, first served. One whose caller lags
            behind is not counted.
        max_waiting: Texts taken on besides; one more is refused.
    """

    max_active: int = 16
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        if self.max_active < 1 or self.max_waiting < 0:
            raise ConfigError(f"{self}; expected max_active of at least 1 and max_waiting of at least 0")


class _Text:
    """One caller's decoding, and the steps it has not fetched yet."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding = decoding
        self.steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self.is_withdrawn = False
        self.has_left = threading.Event()
        self.last_chunk = 0  # number of its latest prefill chunk among all

    @property
    def is_ready(self) -> bool:
        """True if a pass may be run for it: it is not over, and its caller is not too far behind."""
        return not self.is_over and self.steps.qsize() < _LOOKAHEAD

    @property
    def is_over(self) -> bool:
        """True if no pass will be run for it any more."""
        return self.is_withdrawn or self.decoding.is_done


class Scheduler:
    """Decodes many texts on one target; its thread lives from the first text until `close`."""

    def __init__(
        self,
        target: Target,
        *,
        planner: Planner | None = None,
        limits: Limits | None = None,
        name: str = "dlite-engine",
    ) -> None:
        """Serve one target.

        Args:
            target: The model; nobody else may run it meanwhile.
            planner: Decides how long drafts are; by default as long as the requests allow.
            limits: How much to take on.
            name: The thread's name.
        """
        self._target = target
        self._planner = planner or FixedLength()
        self._limits = limits or Limits()
        self._name = name
        self._condition = threading.Condition()
        self._texts: list[_Text] = []  # in the order of their arrival
        self._chunks = count(1)
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def decode(self, state: TargetState, drafter: Drafter, request: Request) -> Generator[Step]:
        """Decode one request together with those of other callers; see `decode.decode`.

        The state belongs to the engine until the iteration ends; closing it returns once no pass uses the state.

        Raises:
            ContextLengthError: If the prompt leaves no room for a token; nothing was computed.
            EngineBusyError: If too many texts wait already.
            DLiteError: If the scheduler was closed, the interpreter exits, or this process was forked from one that
                ran an engine.
        """
        lifetime.check_life()
        text = self._admit(state, drafter, request)
        try:
            while (step := text.steps.get()) is not None:
                self._wake()
                yield step
                lifetime.check_fork()
            if text.decoding.error is not None:
                raise text.decoding.error
        finally:
            text.is_withdrawn = True
            if not lifetime.is_forked():
                self._wake()
                text.has_left.wait()

    def close(self, *, timeout: float = 5.0) -> None:
        """End every text within one pass, with an error for its caller, and wait for it; a forked child has none."""
        if lifetime.is_forked():
            return
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        lifetime.forget(self.close)  # it would keep the weights alive

    def _check_open(self) -> None:
        if self._is_closed:
            raise DLiteError("the engine is closed; create a new ChatDLite")
        if self._thread is None:
            lifetime.close_at_exit(self.close)
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _admit(self, state: TargetState, drafter: Drafter, request: Request) -> _Text:
        with self._condition:
            self._check_open()
            if any(text.decoding.state is state for text in self._texts):
                raise DLiteError("this state is being decoded already; give each text a state of its own")
            if len(self._texts) >= self._limits.max_active + self._limits.max_waiting:
                raise EngineBusyError(
                    f"the engine has {len(self._texts)} texts already; try again later, or raise Limits.max_waiting"
                )
            text = _Text(Decoding(self._target, state, drafter, request))
            self._texts.append(text)
            self._condition.notify_all()
            return text

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while texts := self._next_texts():
                self._run_once(texts)
        finally:
            with self._condition:
                self._is_closed = True
                for text in self._texts:
                    if not text.is_over:
                        text.decoding.error = DLiteError("the engine was closed while it decoded this text")
                    self._dismiss(text)

    def _next_texts(self) -> list[_Text]:
        """Wait for work; return the texts to run passes for, none when the engine is closed."""
        with self._condition:
            while not self._is_closed:
                self._dismiss_ended()
                ready = (text for text in self._texts if text.is_ready)
                if chosen := list(islice(ready, self._limits.max_active)):
                    return chosen
                self._condition.wait()
            return []

    def _dismiss_ended(self) -> None:
        for text in [text for text in self._texts if text.is_over]:
            self._texts.remove(text)
            self._dismiss(text)

    def _run_once(self, texts: list[_Text]) -> None:
        """Run one prefill chunk, and one packed pass over all other texts."""
        long = [text for text in texts if text.decoding.needs_own_pass]
        if long:
            first = min(long, key=lambda text: text.last_chunk)
            first.last_chunk = next(self._chunks)
            self._pass([first])
        short = [text for text in texts if text not in long]
        if short:
            self._pass(short)

    @staticmethod
    def _dismiss(text: _Text) -> None:
        text.has_left.set()
        text.steps.put(None)

    def _pass(self, texts: list[_Text]) -> None:
        try:
            steps = run_pass(self._target, [text.decoding for text in texts], self._planner)
        except BaseException as error:  # the pass's own (memory, a broken model): every text of it ends
            for text in texts:
                text.decoding.error = error
            return
        for text, step in zip(texts, steps, strict=True):
            if step is not None:
                text.steps.put(step)
