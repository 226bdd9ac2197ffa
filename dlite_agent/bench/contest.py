"""Ways of decoding against each other: the same prompts, one after the other in one process, again and again.

Every side computes a prompt's rows once; each contender then decodes from there, and the rounds alternate between the
contenders, so that whatever else the machine does meets all of them. What is compared are ratios within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

from dlite_agent.bench.prompts import KINDS, Kind, RecordedPrompt
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.engine.decode import Decoding, decode
from dlite_agent.engine.draft_length import Planner
from dlite_agent.engine.request import Request, Step
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.state import TargetState, common_prefix
from dlite_agent.engine.target import Target
from dlite_agent.errors import ConfigError

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some measurements, the least and the most."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarize at least one value."""
        values = list(values)
        return cls(median(values), min(values), max(values))

    def as_dict(self) -> dict[str, float]:
        """Return plain numbers for JSON."""
        return {"median": self.median, "min": self.min, "max": self.max}


@dataclass(frozen=True, slots=True)
class Run:
    """What one contender made of one prompt.

    Attributes:
        tokens: All tokens generated.
        num_decoded: Those behind the first pass, which is prefill's.
        num_passes: Target passes that gave them.
        first_seconds: From the call to the end of the first pass.
        decode_seconds: From there to the last token.
    """

    tokens: tuple[int, ...]
    num_decoded: int
    num_passes: int
    first_seconds: float
    decode_seconds: float

    @classmethod
    def of(cls, start: float, passes: Sequence[tuple[float, Sequence[int]]]) -> Run:
        """Sum up passes, each the time of its end and its tokens."""
        tokens = tuple(token for _, given in passes for token in given)
        first, last = passes[0][0], passes[-1][0]
        return cls(tokens, len(tokens) - len(passes[0][1]), len(passes) - 1, first - start, last - first)


class Side(Protocol):
    """One copy of the weights and the rows of one prompt."""

    def prefill(self, ids: Sequence[int]) -> float:
        """Compute all rows of a prompt but the last one; returns the seconds it took."""
        ...


class OurSide:
    """Our engine on one target and one session's state."""

    def __init__(self, target: Target, *, end_ids: frozenset[int]) -> None:
        self.target = target
        self.end_ids = end_ids
        self.state = TargetState(target.new_cache())

    def prefill(self, ids: Sequence[int]) -> float:
        """Compute the rows from nothing."""
        self.state = TargetState(self.target.new_cache())
        return self.extend(ids)

    def extend(self, ids: Sequence[int], drafter: Drafter | None = None) -> float:
        """Compute the rows that the state does not hold yet, and let a drafter that reads rows read them."""
        start = time.perf_counter()
        if len(ids) > 1:
            list(decode(self.target, self.state, drafter or NullDrafter(), Request(ids[:-1], max_new_tokens=1)))
        return time.perf_counter() - start

    def follow(self, other: OurSide, ids: Sequence[int]) -> None:
        """Take over the rows of a prompt that another side holds, those that are not there already."""
        if not self.target.is_restorable:
            self.extend(ids)
            return
        theirs = other.state.ids[: other.state.num_rows]
        shared = common_prefix(self.state.ids[: self.state.num_rows], theirs)
        self.state.rewind(shared)
        self.state.cache.append(other.state.cache.rows(shared, len(theirs)))
        self.state.append(theirs[shared:])

    def run(
        self,
        ids: Sequence[int],
        drafter: Drafter,
        *,
        max_tokens: int,
        sampling: SamplingParams | None = None,
        planner: Planner | None = None,
    ) -> Run:
        """Decode behind a prompt whose rows are there."""
        start = time.perf_counter()
        steps = self.steps(ids, drafter, max_tokens=max_tokens, sampling=sampling, planner=planner)
        return Run.of(start, [(time.perf_counter(), step.tokens) for step in steps])

    def steps(
        self,
        ids: Sequence[int],
        drafter: Drafter,
        *,
        max_tokens: int,
        sampling: SamplingParams | None = None,
        planner: Planner | None = None,
        **options: Any,
    ) -> Iterator[Step]:
        """Decode as `run` does, step by step; `options` are further fields of the request."""
        request = replace(self._request(ids, max_tokens, sampling), **options)
        return decode(self.target, self.state, drafter, request, planner=planner)

    def decoding(
        self, ids: Sequence[int], drafter: Drafter, *, max_tokens: int, sampling: SamplingParams | None = None
    ) -> Decoding:
        """Return what decodes as `run` does, for passes that serve several sides."""
        return Decoding(self.target, self.state, drafter, self._request(ids, max_tokens, sampling))

    def _request(self, ids: Sequence[int], max_tokens: int, sampling: SamplingParams | None) -> Request:
        sampling = sampling or SamplingParams()
        return Request(ids, sampling=sampling, max_new_tokens=max_tokens, end_ids=self.end_ids)


@dataclass(frozen=True, slots=True)
class Contender:
    """A way of decoding: `decode(ids, max_tokens)` on a side that holds the prompt's rows."""

    name: str
    side: Side
    decode: Callable[[Sequence[int], int], Run]


@dataclass(frozen=True, slots=True)
class Lap:
    """One contender's run of one prompt in one round."""

    contender: str
    prompt: int
    kind: Kind
    round: int
    prefill_seconds: float
    run: Run


class Results:
    """The laps of a contest."""

    def __init__(self, laps: Sequence[Lap]) -> None:
        self.laps = list(laps)

    def rates(self, name: str, kinds: Sequence[Kind] = KINDS, *, is_end_to_end: bool = False) -> list[float]:
        """Return a contender's tokens per second, one figure a round, over all prompts of some kinds."""
        rounds: dict[int, list[Lap]] = {}
        for lap in self.laps:
            if lap.contender == name and lap.kind in kinds:
                rounds.setdefault(lap.round, []).append(lap)
        return [_rate(laps, is_end_to_end=is_end_to_end) for laps in rounds.values()]

    def ratio(self, over: str, under: str, kinds: Sequence[Kind] = KINDS) -> Spread:
        """Compare the decoding rates of two contenders, round by round.

        Raises:
            ConfigError: If one of them decoded nothing.
        """
        rates = {name: self.rates(name, kinds) for name in (over, under)}
        for name, values in rates.items():
            if not values or min(values) <= 0:
                raise ConfigError(f"{name} decoded no {' or '.join(kinds)} tokens; take more prompts or more tokens")
        return Spread.of(a / b for a, b in zip(rates[over], rates[under], strict=True))

    def tokens(self, name: str) -> dict[int, tuple[int, ...]]:
        """Return what a contender generated in its first round, by prompt."""
        return {lap.prompt: lap.run.tokens for lap in self.laps if lap.contender == name and lap.round == 0}

    def tau(self, name: str, kinds: Sequence[Kind] = KINDS) -> float:
        """Return the tokens per target pass, the first pass not counted."""
        runs = [lap.run for lap in self.laps if lap.contender == name and lap.kind in kinds]
        return sum(run.num_decoded for run in runs) / max(1, sum(run.num_passes for run in runs))

    def summary(self, name: str) -> dict[str, Any]:
        """Return a contender's rates by kind, for JSON."""
        fields: dict[str, Any] = {}
        for kind in KINDS:
            if rates := self.rates(name, [kind]):
                fields[f"{kind}_tokens_per_s"] = Spread.of(rates).as_dict()
                fields[f"{kind}_tau"] = self.tau(name, [kind])
        end_to_end = self.rates(name, is_end_to_end=True)
        return {**fields, "end_to_end_tokens_per_s": Spread.of(end_to_end).as_dict()}


def _rate(laps: Sequence[Lap], *, is_end_to_end: bool) -> float:
    """Return tokens per second of some laps together; nothing decoded is 0."""
    if is_end_to_end:
        seconds = sum(lap.prefill_seconds + lap.run.first_seconds + lap.run.decode_seconds for lap in laps)
        return sum(len(lap.run.tokens) for lap in laps) / seconds
    seconds = sum(lap.run.decode_seconds for lap in laps)
    return sum(lap.run.num_decoded for lap in laps) / seconds if seconds else 0.0


def contest(
    contenders: Sequence[Contender], prompts: Sequence[RecordedPrompt], *, max_tokens: int, num_rounds: int
) -> Results:
    """Let every contender decode every prompt `num_rounds` times, alternating; a short round before warms up."""
    sides = {id(contender.side): contender.side for contender in contenders}
    laps = []
    for index, prompt in enumerate(prompts):
        prefill_seconds = {key: side.prefill(prompt.ids) for key, side in sides.items()}
        if index == 0:
            for contender in contenders:
                contender.decode(prompt.ids, min(max_tokens, _WARM_UP_TOKENS))
        for number in range(num_rounds):
            for contender in contenders:
                run = contender.decode(prompt.ids, max_tokens)
                seconds = prefill_seconds[id(contender.side)]
                laps.append(Lap(contender.name, index, prompt.kind, number, seconds, run))
    return Results(laps)


def tap(target: Target, layer_ids: Sequence[int]) -> None:
    """Make the target take the features that a drafter reads, before that drafter's turn."""
    if tuple(layer_ids) != target.layer_ids:
        target.tap(layer_ids)
