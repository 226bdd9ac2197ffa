"""What a change of turn costs each drafter: the time until its first draft is there, against plain decoding.

Three changes: a tool result comes behind the context; a few tokens in the middle of it are edited, so that the target
computes everything behind them again; the session is taken up by a new process, where the target's rows are restored
and the drafter is new. What a drafter forces the target to compute again is in its time. Each drafter has a session
of its own here, and they alternate; what a drafter costs is its time less plain decoding's in the same round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dlite_agent.bench.contest import Spread, tap
from dlite_agent.bench.drafters.sessions import PLAIN, Contestant
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.engine.decode import decode
from dlite_agent.engine.request import Request
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target

TOOL_RESULT, PLAN_EDIT, RESUME = "tool result", "plan edit", "resume"
_EDITED_TOKENS = 8
_MESSAGE_TOKENS = 32
_MAX_TOKENS = 16  # of a reply: room for a whole draft

Load = Callable[[str], Drafter]


@dataclass(frozen=True, slots=True)
class TurnTime:
    """One turn's beginning.

    Attributes:
        seconds: Until the first draft is there, that is until the second pass begins.
        step_seconds: Until the second step, the verification of that draft included.
        draft_seconds: The time of the first draft itself, bringing the drafter's state up to date included.
        num_prefilled: Prompt rows that the target computed.
        num_drafted: Tokens of the first draft.
    """

    seconds: float
    step_seconds: float
    draft_seconds: float
    num_prefilled: int
    num_drafted: int


@dataclass(slots=True)
class TurnCost:
    """What one change of turn cost one drafter, round by round.

    Attributes:
        times: The turn's beginnings.
        extra_seconds: What they took longer than plain decoding's.
    """

    times: list[TurnTime] = field(default_factory=list)
    extra_seconds: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """Return milliseconds and rows for JSON."""
        return {
            "total_ms": Spread.of(1e3 * t.seconds for t in self.times).as_dict(),
            "second_step_ms": Spread.of(1e3 * t.step_seconds for t in self.times).as_dict(),
            "extra_ms": Spread.of(1e3 * seconds for seconds in self.extra_seconds).as_dict(),
            "draft_ms": Spread.of(1e3 * t.draft_seconds for t in self.times).as_dict(),
            "rows": max(t.num_prefilled for t in self.times),
            "drafted": min(t.num_drafted for t in self.times),
        }


class TurnChanges:
    """Measures the changes on one target."""

    def __init__(
        self,
        target: Target,
        contestants: Sequence[Contestant],
        *,
        base: Sequence[int],
        result: Sequence[int],
        load: Load,
    ) -> None:
        """Set up; the first contestant must be plain decoding.

        Args:
            target: The target.
            contestants: The drafters.
            base: The context's tokens.
            result: The tool result's tokens.
            load: Makes a new drafter of a spec.
        """
        assert contestants[0].spec == PLAIN
        self._target = target
        self._contestants = list(contestants)
        self._base = list(base)
        self._result = list(result)
        self._load = load

    def measure(self, *, num_rounds: int) -> dict[str, dict[str, TurnCost]]:
        """Return the costs by change and drafter; a target whose rows cannot be restored is not resumed."""
        changes = {TOOL_RESULT: self._tool_result, PLAN_EDIT: self._plan_edit}
        if self._target.is_restorable:
            changes[RESUME] = self._resume
        return {name: self._alternate(change(), num_rounds) for name, change in changes.items()}

    def _alternate(self, run: Callable[[int, Contestant], TurnTime], num_rounds: int) -> dict[str, TurnCost]:
        costs = {contestant.spec: TurnCost() for contestant in self._contestants}
        for number in range(num_rounds + 1):
            times = {}
            for contestant in self._contestants:
                tap(self._target, contestant.layer_ids)
                times[contestant.spec] = run(number, contestant)
            if number == 0:  # warms up
                continue
            for spec, taken in times.items():
                costs[spec].times.append(taken)
                costs[spec].extra_seconds.append(taken.seconds - times[PLAIN].seconds)
        return costs

    def _tool_result(self) -> Callable[[int, Contestant], TurnTime]:
        states = self._new_states()

        def run(number: int, contestant: Contestant) -> TurnTime:
            state = states[contestant.spec]
            reply = self._reply(state, contestant.drafter, self._base)
            return self._begin_turn(state, contestant.drafter, [*self._base, *reply, *self._result])

        return run

    def _plan_edit(self) -> Callable[[int, Contestant], TurnTime]:
        """Go back and forth between two versions of the context; each step is an edit."""
        states = self._new_states()
        middle = len(self._base) // 2
        edited = list(self._base)
        for place in range(middle, min(middle + _EDITED_TOKENS, len(edited))):
            edited[place] = (edited[place] + 1) % self._target.vocab_size
        versions = (edited, self._base)

        def run(number: int, contestant: Contestant) -> TurnTime:
            state = states[contestant.spec]
            if number == 0:
                self._reply(state, contestant.drafter, versions[1])
            return self._begin_turn(state, contestant.drafter, versions[number % 2])

        return run

    def _resume(self) -> Callable[[int, Contestant], TurnTime]:
        stored = TargetState(self._target.new_cache())
        reply = self._reply(stored, self._contestants[0].drafter, self._base)
        prompt = [*self._base, *reply, *self._result[:_MESSAGE_TOKENS]]

        def run(number: int, contestant: Contestant) -> TurnTime:
            drafter = self._load(contestant.spec)
            tap(self._target, contestant.layer_ids)
            return self._begin_turn(stored.copy(self._target.new_cache()), drafter, prompt)

        return run

    def _new_states(self) -> dict[str, TargetState]:
        return {contestant.spec: TargetState(self._target.new_cache()) for contestant in self._contestants}

    def _reply(self, state: TargetState, drafter: Drafter, ids: Sequence[int]) -> list[int]:
        """Decode a reply, so that state and drafter are where a turn leaves them."""
        steps = decode(self._target, state, drafter, Request(ids, max_new_tokens=_MAX_TOKENS))
        return [token for step in steps for token in step.tokens]

    def _begin_turn(self, state: TargetState, drafter: Drafter, ids: Sequence[int]) -> TurnTime:
        """Decode the first two steps of a turn."""
        steps = decode(self._target, state, drafter, Request(ids, max_new_tokens=_MAX_TOKENS))
        start = time.perf_counter()
        first, second = next(steps), next(steps)
        seconds = time.perf_counter() - start
        return TurnTime(
            seconds=seconds - second.target_seconds,
            step_seconds=seconds,
            draft_seconds=second.draft_seconds,
            num_prefilled=first.num_prefilled,
            num_drafted=second.num_proposed,
        )
