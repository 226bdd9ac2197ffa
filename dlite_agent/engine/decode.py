"""Speculative decoding, the whole of it: draft, run the target once over the draft, keep what it agrees with.

    pending rows   [x_j .. x_a]                    known tokens that the target has not seen yet: a new prompt, or just
                                                   the newest token, the *anchor* x_a
    draft          d_1..d_K                        what the grammar forces, what the drafter proposes
    target         [x_j .. x_a, d_1..d_K]          K + 1 rows of logits in about the time of one
    verify         d_1..d_m                        accepted while each is the target's own draw; one more token, the
                                                   bonus, comes free
    crop           the KV rows of the rest         the bonus is the new anchor, row m the new *pivot*

One pass may serve several texts (`run_pass`): their rows stand side by side, each with its own cache. Plain decoding
is the same loop with the null drafter, prefilling is the same loop with many pending rows. Text, streaming, metrics and
stop handling consume the `Step`s.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from dlite_agent.drafters.protocol import Drafter, DraftView, RowReader
from dlite_agent.engine.attention import ROWWISE_MAX_ROWS
from dlite_agent.engine.draft_length import FixedLength, Planner
from dlite_agent.engine.drafting import Draft, draft_draw, propose
from dlite_agent.engine.packed import Segment
from dlite_agent.engine.processors import Sampler
from dlite_agent.engine.request import Request, Step
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target, TargetOutput
from dlite_agent.engine.verify import Verdict, verify
from dlite_agent.errors import ConfigError, ContextLengthError

logger = logging.getLogger(__name__)

PREFILL_CHUNK = 256
_RESERVED_TOKENS = 1024


class Decoding:
    """One text on its way: which rows it needs from the next pass, and what it makes of them.

    However it ends (end token, bound, cancellation, an error), `state` holds exactly the tokens given and KV rows of
    some of them, ready for the next request.

    Attributes:
        error: What ended it early, or None.
        on_rows: Told (first row, features) of every row that is computed, or None where the last ones are enough.
    """

    def __init__(self, target: Target, state: TargetState, drafter: Drafter, request: Request) -> None:
        """Begin with a prompt.

        Raises:
            ContextLengthError: If the prompt leaves no room for a token; nothing was computed.
            ConfigError: If the prompt holds ids that are not in the vocabulary; nothing was computed.
        """
        room = _room(target, request.prompt_ids)
        ids = np.asarray(request.prompt_ids)
        if ids.dtype.kind not in "iu":
            raise ConfigError(f"the prompt holds {ids.dtype} values; expected token ids, which are integers")
        if len(wrong := ids[(ids < 0) | (ids >= target.vocab_size)]):
            raise ConfigError(f"the prompt holds token id {wrong[0]}; expected ids 0..{target.vocab_size - 1}")
        prompt = ids.astype(np.int32)
        _show_again(state, drafter)
        num_reused = state.begin(prompt)
        self._set_up(target, state, drafter, request, num_reused=num_reused, budget=room)

    @classmethod
    def behind(cls, target: Target, state: TargetState, drafter: Drafter, request: Request) -> Decoding:
        """Begin behind the state's own last token, if there is room; `request.prompt_ids` is not looked at.

        Raises:
            ContextLengthError: If there is no last token.
        """
        if not len(state.ids):
            raise ContextLengthError("there is no text to continue; expected a state with at least one token")
        _show_again(state, drafter)
        decoding = cls.__new__(cls)
        budget = target.max_positions - len(state.ids)
        decoding._set_up(target, state, drafter, request, num_reused=None, budget=budget)
        return decoding

    def _set_up(
        self,
        target: Target,
        state: TargetState,
        drafter: Drafter,
        request: Request,
        *,
        num_reused: int | None,
        budget: int,
    ) -> None:
        self.state = state
        self.drafter = drafter
        self.drafter_name = _name_of(drafter)
        self.request = request
        self.error: BaseException | None = None
        self.on_rows: Callable[[int, torch.Tensor], None] | None = None
        self._reader = drafter if isinstance(drafter, RowReader) else None
        self.vocab_size = target.vocab_size
        self._budget = min(request.max_new_tokens, budget)
        self._sampler = Sampler(request.sampling, prompt_ids=state.ids.tolist(), end_ids=request.end_ids)
        self._num_reused = num_reused  # None once the first token is there
        self._num_prompt = len(state.ids)
        self._prefill_seconds = 0.0
        self._has_ended = False
        self._has_warned = False
        state.cache.reserve(self._num_prompt + min(self._budget, _RESERVED_TOKENS))

    @property
    def is_done(self) -> bool:
        """True once no further pass is needed or wanted."""
        with _blaming(self):
            return self.error is not None or self._has_ended or self._budget < 1 or self.request.is_cancelled()
        return True  # asking whether it is cancelled was an error

    @property
    def num_pending(self) -> int:
        """Rows of known tokens that the next pass computes."""
        return min(len(self.state.ids) - self.state.num_rows, PREFILL_CHUNK)

    @property
    def needs_own_pass(self) -> bool:
        """True for a prefill chunk: so many rows do not share a pass (`run_pass`)."""
        return self.num_pending > ROWWISE_MAX_ROWS

    def new_draft(self, planner: Planner) -> Draft:
        """Start a draft as long as it may be; of no token while more than the anchor is pending."""
        is_ready = self._num_reused is None and len(self.state.ids) - self.state.num_rows == 1
        room = min(self.request.max_draft, self._budget - 1) if is_ready else 0
        if room > 0:
            room = min(room, planner.limit(self.drafter_name))
        return Draft(self.request.constraint, self.request.end_ids, room)

    def view(self, draft: Draft) -> DraftView:
        """Return what the drafter may see, and cannot change."""
        ids = self.state.ids
        ids.flags.writeable = False
        position = len(self.state.ids) + len(draft.tokens)
        draw = draft_draw(self.request.sampling, position=position)
        # Under rejection what is drawn must not depend on the grammar.
        guide = None if self.request.sampling.verification == "rejection" else draft.look_ahead()
        return DraftView(ids, tuple(draft.tokens), self.state.pivot, draft.room_left, draw, self.state.key, guide)

    def segment(self, draft: Draft) -> Segment:
        """Return the rows to compute: the pending ones and the draft's."""
        start = self.state.num_rows
        if draft.tokens:
            self.state.cache.checkpoint()
        ids = self.state.ids[start : start + self.num_pending].tolist() + draft.tokens
        num_wanted = len(draft.tokens) + 1
        is_read = self.on_rows is not None or self._reader is not None
        return Segment(ids, self.state.cache, num_wanted, len(ids) if is_read else num_wanted)

    def take(self, draft: Draft, output: TargetOutput, timing: PassTiming) -> Step | None:
        """Make of the computed rows what the target agrees with; None while the prompt goes on."""
        state = self.state
        try:
            self._show(state.num_rows - len(output.features), output.features)
            if self._num_reused is not None:
                self.request.on_prefill(state.num_rows - self._num_reused, self._num_prompt - self._num_reused)
            if state.num_rows < len(state.ids):
                self._prefill_seconds += time.perf_counter() - timing.drafted_at
                return None
            verdict = verify(
                output.logits,
                draft.tokens,
                self._sampler,
                position=len(state.ids),
                bitmask_at=lambda k: draft.bitmasks[k],
                distributions=draft.distributions,
            )
        except BaseException:
            state.cache.crop_to(len(state.ids) - 1)
            raise
        return self._keep(draft, output, verdict, timing)

    def _keep(self, draft: Draft, output: TargetOutput, verdict: Verdict, timing: PassTiming) -> Step:
        """Make the accepted tokens text and crop the rows of the others."""
        state = self.state
        # An accepted end token stays the anchor: its row is not kept.
        num_kept = verdict.num_accepted if verdict.has_bonus else verdict.num_accepted - 1
        state.cache.crop_to(len(state.ids) + num_kept)
        state.pivot = output.features[num_kept - len(output.logits)]  # counted from the last row
        self._accept(verdict.tokens)
        sources = draft.sources[: verdict.num_accepted] + (["bonus"] if verdict.has_bonus else [])
        step = Step(
            verdict.tokens,
            tuple(sources),
            verdict.logprobs,
            num_proposed=len(draft.tokens),
            num_faults=draft.num_faults,
            num_shared=timing.num_shared,
            draft_seconds=timing.draft_seconds,
            target_seconds=time.perf_counter() - timing.drafted_at,
        )
        return step if self._num_reused is None else self._first(step)

    def _first(self, step: Step) -> Step:
        """Turn the step that ends the prefill into what it is."""
        assert self._num_reused is not None
        num_reused, self._num_reused = self._num_reused, None
        self.state.cache.checkpoint(keep=True)
        return Step(
            step.tokens,
            ("prefill",),
            step.logprobs,
            num_shared=step.num_shared,
            target_seconds=self._prefill_seconds + step.target_seconds,
            num_reused=num_reused,
            num_prefilled=self._num_prompt - num_reused,
        )

    def _show(self, start: int, features: torch.Tensor) -> None:
        """Pass rows on; a drafter that fails to read them lacks them, and that is its own affair."""
        if self.on_rows is not None:
            self.on_rows(start, features)
        if self._reader is not None:
            try:
                self._reader.read(self.state.key, start, features)
            except Exception as error:
                self.warn_of_drafter(repr(error))

    def warn_of_drafter(self, problem: str) -> None:
        """Say once per text that its drafter does not work."""
        level = logging.DEBUG if self._has_warned else logging.WARNING
        logger.log(level, "drafter %s: %s; decoding goes on without that draft", self.drafter_name, problem)
        self._has_warned = True

    def _accept(self, tokens: Sequence[int]) -> None:
        """Make tokens part of the text."""
        self.state.append(tokens)
        self._sampler.advance(tokens)
        self._budget -= len(tokens)
        self._has_ended = tokens[-1] in self.request.end_ids
        if self.request.constraint is not None:
            for token in tokens:
                if token not in self.request.end_ids:
                    self.request.constraint.advance(token)


def _show_again(state: TargetState, drafter: Drafter) -> None:
    """Give up rows that a drafter with a history needs and has not read: the target computes them again.

    A drafter that cannot say what it has read lacks those rows, and that is its own affair.
    """
    if not isinstance(drafter, RowReader):
        return
    try:
        num_read = operator.index(drafter.num_read(state.key))
        if num_read < 0:
            raise ValueError(f"{num_read} rows read; expected at least 0")
    except Exception as error:
        logger.warning("drafter %s: %r; it gets no row again", _name_of(drafter), error)
        return
    state.forget_rows(num_read)


def _name_of(drafter: Drafter) -> str:
    try:
        return str(drafter.name)
    except Exception:  # a drafter is foreign code; the text does not depend on it
        return type(drafter).__name__


def decode(
    target: Target, state: TargetState, drafter: Drafter, request: Request, *, planner: Planner | None = None
) -> Iterator[Step]:
    """Decode one request on a session's state, one `Step` per target pass.

    Args:
        target: The model.
        state: The session; see `Decoding` for how it is left.
        drafter: Proposes; it cannot change the text.
        request: What to decode.
        planner: Decides how long drafts are; by default as long as `request.max_draft` allows.

    Raises:
        ContextLengthError: If the prompt leaves no room for a token; nothing was computed.
    """
    yield from _run(target, Decoding(target, state, drafter, request), planner or FixedLength())


def resume(
    target: Target, state: TargetState, drafter: Drafter, request: Request, *, planner: Planner | None = None
) -> Iterator[Step]:
    """Continue decoding behind the state's own last token, if there is room; `request.prompt_ids` is not looked at.

    Raises:
        ContextLengthError: If there is no last token.
    """
    yield from _run(target, Decoding.behind(target, state, drafter, request), planner or FixedLength())


def _run(target: Target, decoding: Decoding, planner: Planner) -> Iterator[Step]:
    while not decoding.is_done:
        (step,) = run_pass(target, [decoding], planner)
        if step is not None:
            yield step
    if decoding.error is not None:
        raise decoding.error


@dataclass(frozen=True, slots=True)
class PassTiming:
    """When a pass did what, and for how many texts."""

    draft_seconds: float
    drafted_at: float
    num_shared: int


def run_pass(target: Target, decodings: Sequence[Decoding], planner: Planner) -> list[Step | None]:
    """Draft for all, run the target once over all drafts, keep what it agrees with.

    What goes wrong with one text becomes its `error`; the others go on. A text that `needs_own_pass` must be alone.

    Returns:
        A step for each, or None where there is none.
    """
    start = time.perf_counter()
    drafts = _draft_all(decodings, planner)
    drafted = time.perf_counter()
    planner.cut(drafts, num_known=sum(d.num_pending for d in decodings), draft_seconds=drafted - start)
    able = [i for i, decoding in enumerate(decodings) if decoding.error is None]
    steps: list[Step | None] = [None] * len(decodings)
    if not able:
        return steps
    outputs = target.forward_many([decodings[i].segment(drafts[i]) for i in able])
    timing = PassTiming(drafted - start, drafted, len(able))
    for i, output in zip(able, outputs, strict=True):
        with _blaming(decodings[i]):
            steps[i] = decodings[i].take(drafts[i], output, timing)
    planner.observe(drafts, steps, draft_seconds=timing.draft_seconds)
    return steps


def _draft_all(decodings: Sequence[Decoding], planner: Planner) -> list[Draft]:
    """Draft for each text; the texts of one drafter are drafted together."""
    drafts = [decoding.new_draft(planner) for decoding in decodings]
    pairs = list(zip(decodings, drafts, strict=True))
    try:
        for decoding, draft in pairs:
            with _blaming(decoding):
                draft.begin()
        _ask_drafters(pairs)
    finally:
        for decoding, draft in pairs:
            with _blaming(decoding):
                draft.rewind_constraint()
    return drafts


def _ask_drafters(pairs: Sequence[tuple[Decoding, Draft]]) -> None:
    """Fill the drafts that have room left."""
    by_drafter: dict[int, list[tuple[Decoding, Draft]]] = {}
    for decoding, draft in pairs:
        if draft.room_left > 0 and decoding.error is None:
            by_drafter.setdefault(id(decoding.drafter), []).append((decoding, draft))
    for open_pairs in by_drafter.values():
        first = open_pairs[0][0]
        views = [decoding.view(draft) for decoding, draft in open_pairs]
        proposals, problems = propose(first.drafter, views, vocab_size=first.vocab_size)
        for (decoding, draft), proposal, problem in zip(open_pairs, proposals, problems, strict=True):
            if problem is not None:
                draft.num_faults += 1
                decoding.warn_of_drafter(problem)
            with _blaming(decoding):
                draft.extend(proposal)
                draft.force()


@contextmanager
def _blaming(decoding: Decoding) -> Iterator[None]:
    """Make an error (of a grammar, a callback) that text's own, so that the others go on."""
    try:
        yield
    except BaseException as error:
        decoding.error = decoding.error or error


def _room(target: Target, ids: Sequence[int]) -> int:
    """Return how many tokens fit behind these."""
    if not len(ids):
        raise ContextLengthError("the prompt is empty; expected at least one token")
    if len(ids) >= target.max_positions:
        raise ContextLengthError(
            f"the prompt has {len(ids)} tokens and the model's context {target.max_positions}; shorten the conversation"
        )
    return target.max_positions - len(ids)
