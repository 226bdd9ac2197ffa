"""How long a draft should be: as long as one more row is expected to pay for itself.

A pass over R rows costs c(R), measured once per machine and target. A drafted token that is accepted with probability
p (its whole prefix included) adds p tokens to the pass. So the rows of a pass are given to the likeliest tokens of all
texts until (tokens expected) / (time to draft + c(rows)) stops growing. A drafter that does not pay for its own time is
left alone, and asked again after a while.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dlite_agent.engine.row_tables import table_path, write_calibration

if TYPE_CHECKING:
    from dlite_agent.engine.drafting import Draft
    from dlite_agent.engine.request import Step
    from dlite_agent.engine.target import Target

_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_ROUNDS = 5
_CONTEXT = 64
_UNLIMITED = 1 << 30

_BUCKETS = 10
_PRIOR_WEIGHT = 4.0  # observations that a drafter's own confidence is worth
_DECAY = 0.98  # what an observation is worth after the next one of its kind
_FORGET = 0.99  # and after every pass without one: what was given up is tried again

_FIRST_PAUSE = 8
_LONGEST_PAUSE = 256
_TOLERATED_LOSS = 0.02  # a drafter that costs less than this is asked in any case


class Planner(Protocol):
    """Decides how much of what could be drafted is drafted and verified."""

    def limit(self, drafter: str) -> int:
        """Return how many tokens the drafter may propose for one text in the coming pass."""
        ...

    def cut(self, drafts: Sequence[Draft], *, num_known: int, draft_seconds: float) -> None:
        """Shorten the drafts of one pass that computes `num_known` rows besides."""
        ...

    def observe(self, drafts: Sequence[Draft], steps: Sequence[Step | None], *, draft_seconds: float) -> None:
        """Learn from a pass."""
        ...


class FixedLength:
    """Verifies all that is drafted."""

    def limit(self, drafter: str) -> int:
        """Return no limit but the request's own."""
        return _UNLIMITED

    def cut(self, drafts: Sequence[Draft], *, num_known: int, draft_seconds: float) -> None:
        """Cut nothing."""

    def observe(self, drafts: Sequence[Draft], steps: Sequence[Step | None], *, draft_seconds: float) -> None:
        """Learn nothing."""


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one target pass by rows, as measured at some counts.

    A pass costs no more than one of more rows: where a smaller count seems to, something else was going on.
    """

    seconds: dict[int, float]

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds) != 1 or not all(0 < s < math.inf for s in self.seconds.values()):
            raise ValueError(f"pass costs {self.seconds}; expected positive seconds from 1 row on")

    def __call__(self, num_rows: int) -> float:
        """Return the seconds of a pass over `num_rows` rows; beyond the measured ones it grows in proportion."""
        largest = max(self.seconds)
        if num_rows > largest:
            return self.seconds[largest] * num_rows / largest
        return min(seconds for count, seconds in self.seconds.items() if count >= num_rows)

    @classmethod
    def of(cls, target: Target, *, folder: Path | None = None) -> PassCost:
        """Return the target's costs on this machine, measuring them if they are not in `folder` yet."""
        path = None
        if folder is not None:
            path = folder / f"pass-seconds-{target.fingerprint}-{table_path(folder, target.dtype).stem}.json"
            try:
                return cls({int(rows): float(seconds) for rows, seconds in json.loads(path.read_text()).items()})
            except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError):
                pass  # not there, or damaged: measured again
        cost = cls.measure(target)
        if path is not None:
            write_calibration(path, json.dumps(cost.seconds))
        return cost

    @classmethod
    def measure(cls, target: Target) -> PassCost:
        """Time passes behind a short context, all counts in turn, a few times: a busy while must not hit one alone.

        The least time of each is taken: whatever else the machine does only ever adds.
        """
        cache = target.new_cache()
        context = [i % target.vocab_size for i in range(min(_CONTEXT, target.max_positions // 2))]
        counts = [num_rows for num_rows in _ROWS if len(context) + num_rows <= target.max_positions]
        seconds = dict.fromkeys(counts, math.inf)
        for _ in range(_ROUNDS):
            for num_rows in counts:
                cache.crop_to(len(context))
                if missing := context[cache.num_rows :]:
                    target.forward(missing, cache)
                start = time.perf_counter()
                output = target.forward(context[:1] * num_rows, cache, num_logits=num_rows, num_features=num_rows)
                output.logits[-1, -1].item()  # a device may still be computing
                seconds[num_rows] = min(seconds[num_rows], time.perf_counter() - start)
        return cls(seconds)


@dataclass(slots=True)
class _Acceptance:
    """Running acceptance of tokens that came with about the same confidence."""

    accepted: float = 0.0
    seen: float = 0.0
    last_pass: int = 0

    def fade(self, now: int) -> None:
        kept = _FORGET ** (now - self.last_pass)
        self.accepted, self.seen, self.last_pass = self.accepted * kept, self.seen * kept, now

    def add(self, is_accepted: bool) -> None:
        self.accepted = self.accepted * _DECAY + is_accepted
        self.seen = self.seen * _DECAY + 1

    def estimate(self, confidence: float) -> float:
        return (self.accepted + _PRIOR_WEIGHT * confidence) / (self.seen + _PRIOR_WEIGHT)


@dataclass(slots=True)
class _Account:
    """What a drafter costs and brings, per pass that asked it."""

    seconds: float = 0.0
    accepted: float = 1.0
    rows: float = 1.0
    pause: int = 0
    next_pause: int = _FIRST_PAUSE

    def add(self, *, seconds: float, accepted: float, rows: float) -> None:
        for name, value in (("seconds", seconds), ("accepted", accepted), ("rows", rows)):
            setattr(self, name, 0.9 * getattr(self, name) + 0.1 * value)


@dataclass(slots=True)
class AdaptiveLength:
    """Chooses draft lengths from pass costs, the drafters' confidence and how well that has held so far.

    It serves all texts of a target, so what one teaches the others use. It changes the speed, never the text.
    """

    cost: PassCost
    _cells: dict[tuple[str, int], _Acceptance] = field(default_factory=dict)
    _accounts: dict[str, _Account] = field(default_factory=dict)
    _limits: dict[str, int] = field(default_factory=dict)  # of the coming pass
    _num_passes: int = 0

    def limit(self, drafter: str) -> int:
        """Return 0 while the drafter pauses; then it is asked once more."""
        account = self._accounts.setdefault(drafter, _Account())
        if drafter not in self._limits:
            self._limits[drafter] = 0 if account.pause else _UNLIMITED
            account.pause = max(0, account.pause - 1)
        return self._limits[drafter]

    def cut(self, drafts: Sequence[Draft], *, num_known: int, draft_seconds: float) -> None:
        """Keep the tokens whose rows pay; those of one draft always from its start.

        Drafts for rejection stay whole: what was drawn there must not decide where they end (`verify` says why).
        """
        free = [index for index, draft in enumerate(drafts) if all(q is None for q in draft.distributions)]
        num_known += sum(len(draft.tokens) for index, draft in enumerate(drafts) if index not in free)
        chances = sorted(((p, index) for index in free for p in self._chances(drafts[index])), key=lambda c: -c[0])
        tokens = accumulate((p for p, _ in chances), initial=float(len(drafts)))
        rates = [expected / (draft_seconds + self.cost(num_known + r)) for r, expected in enumerate(tokens)]
        best = max(range(len(rates)), key=rates.__getitem__)
        chosen = [index for _, index in chances[:best]]
        for index in free:
            drafts[index].cut(chosen.count(index))

    def observe(self, drafts: Sequence[Draft], steps: Sequence[Step | None], *, draft_seconds: float) -> None:
        """Count what was accepted, and let drafters pause that cost more than they bring."""
        self._num_passes += 1
        num_accepted = num_rows = 0
        for draft, step in zip(drafts, steps, strict=True):
            if step is None or not draft.tokens:
                continue
            accepted = len(step.tokens) - step.sources.count("bonus")
            num_accepted, num_rows = num_accepted + accepted, num_rows + len(draft.tokens)
            for k in range(min(accepted + 1, len(draft.tokens))):
                self._cell(draft.sources[k], draft.confidence[k]).add(k < accepted)
        for drafter in [name for name, limit in self._limits.items() if limit]:
            self._settle(drafter, draft_seconds, num_accepted / len(drafts), num_rows / len(drafts))
        self._limits.clear()

    def _settle(self, drafter: str, seconds: float, accepted: float, rows: float) -> None:
        account = self._accounts[drafter]
        account.add(seconds=seconds, accepted=accepted, rows=rows)
        gain = (1 + account.accepted) / (account.seconds + self.cost(1 + round(account.rows)))
        if gain >= (1 - _TOLERATED_LOSS) / self.cost(1):
            account.next_pause = _FIRST_PAUSE
        else:
            account.pause, account.next_pause = account.next_pause, min(2 * account.next_pause, _LONGEST_PAUSE)

    def _chances(self, draft: Draft) -> list[float]:
        """Return for each token how likely it and all before it are accepted."""
        pairs = zip(draft.sources, draft.confidence, strict=True)
        return list(accumulate((self._estimate(source, sure) for source, sure in pairs), mul))

    def _estimate(self, source: str, confidence: float) -> float:
        return min(1.0, self._cell(source, confidence).estimate(confidence))

    def _cell(self, source: str, confidence: float) -> _Acceptance:
        cell = self._cells.setdefault((source, int(confidence * _BUCKETS)), _Acceptance(last_pass=self._num_passes))
        cell.fade(self._num_passes)
        return cell
