"""Speculative decoding, the whole of it: draft, run the target once over the draft, keep what it agrees with.

    prefill:  target(prompt)                       -> the first token, the *anchor*; the last row is the *pivot*
    step:     draft d_1..d_K from what is known    (grammar-forced tokens, the drafter)
              target([anchor, d_1..d_K])           -> K+1 rows of logits in about the time of one
              accept d_1..d_m while each equals the target's own draw; one more token, the bonus, comes free
              crop the KV rows of the rest; the bonus is the new anchor, row m the new pivot

Plain decoding is the same loop with the null drafter. Text, streaming, metrics and stop handling consume the `Step`s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dlite_agent.drafters.protocol import Drafter, DraftView, Proposal
from dlite_agent.engine.attention import ROWWISE_MAX_ROWS
from dlite_agent.engine.constraint import Bitmask, TokenConstraint
from dlite_agent.engine.sampling import SamplingParams, draw
from dlite_agent.engine.state import Ids, TargetState, common_prefix
from dlite_agent.engine.target import Target
from dlite_agent.engine.verify import verify
from dlite_agent.errors import ConfigError, ContextLengthError

PREFILL_CHUNK = 512
MAX_DRAFT = ROWWISE_MAX_ROWS - 1
_RESERVED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Request:
    """What to decode.

    Attributes:
        prompt_ids: The whole prompt; the state's rows are reused as far as they agree with it.
        sampling: How tokens are drawn.
        max_new_tokens: Upper bound of tokens generated.
        end_ids: Tokens that end the text; the end token itself is generated.
        constraint: A grammar, or None.
        max_draft: Longest draft verified at once, 0 to `MAX_DRAFT`.
        is_cancelled: Asked before every pass; True ends the iteration.
        on_prefill: Told (rows done, rows to do) after every prefill chunk.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 1024
    end_ids: frozenset[int] = frozenset()
    constraint: TokenConstraint | None = None
    max_draft: int = 7
    is_cancelled: Callable[[], bool] = lambda: False
    on_prefill: Callable[[int, int], None] = lambda done, total: None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1")
        if not 0 <= self.max_draft <= MAX_DRAFT:
            raise ConfigError(f"max_draft is {self.max_draft}; expected 0..{MAX_DRAFT}")


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens one target pass gave.

    Attributes:
        tokens: New tokens, in order.
        sources: Where each came from: "prefill", "forced", a drafter's name, or "bonus".
        num_proposed: Length of the draft that was verified.
        draft_seconds: Time spent drafting.
        target_seconds: Time spent in the target and in verification.
        num_reused: Prompt rows that were already there (first step only).
        num_prefilled: Prompt rows that were computed (first step only).
    """

    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    num_proposed: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    num_reused: int = 0
    num_prefilled: int = 0


@dataclass(frozen=True, slots=True)
class _Draft:
    tokens: list[int]
    sources: list[str]
    bitmasks: list[Bitmask | None]  # bitmasks[k] holds after k drafted tokens


def decode(target: Target, state: TargetState, drafter: Drafter, request: Request) -> Iterator[Step]:
    """Decode a request on a session's state, one `Step` per target pass.

    However the iteration ends (end token, bound, cancellation, `close()`, an error), `state` holds exactly the tokens
    given and KV rows of some of them, ready for the next call.

    Raises:
        ContextLengthError: If the prompt leaves no room for a token; nothing was computed.
    """
    budget = _token_budget(target, request)
    first = _first(target, state, request)
    if first is None:
        return
    yield first
    yield from _continue(target, state, drafter, request, budget - 1)


def resume(target: Target, state: TargetState, drafter: Drafter, request: Request) -> Iterator[Step]:
    """Continue decoding behind the state's own last token, without prefilling a single row.

    The state must hold a pivot and the rows of all its tokens but the last; `request.prompt_ids` is not looked at.
    """
    assert state.pivot is not None and state.num_rows == len(state.ids) - 1
    budget = min(request.max_new_tokens, target.max_positions - len(state.ids))
    yield from _continue(target, state, drafter, request, budget)


def _continue(target: Target, state: TargetState, drafter: Drafter, request: Request, budget: int) -> Iterator[Step]:
    while budget > 0 and int(state.ids[-1]) not in request.end_ids and not request.is_cancelled():
        step = _speculate(target, state, drafter, request, room=min(request.max_draft, budget - 1))
        budget -= len(step.tokens)
        yield step


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The last prompt row's `logits [vocab]`, and how many prompt rows were already there."""

    logits: torch.Tensor
    num_reused: int


def prefill(target: Target, state: TargetState, request: Request) -> Prefilled | None:
    """Bring the state to the prompt: keep the rows that agree, compute the rest in chunks.

    At least the last prompt row is computed, since its logits and its features are needed.

    Returns:
        None if cancelled between two chunks (the rows done stay usable).
    """
    prompt: Ids = np.asarray(request.prompt_ids, dtype=np.int32)
    kept = min(common_prefix(state.ids[: state.num_rows], prompt), len(prompt) - 1)
    state.rewind(kept)
    state.pivot = None
    state.cache.reserve(len(prompt) + min(request.max_new_tokens, _RESERVED_TOKENS))
    output = None
    for start in range(kept, len(prompt), PREFILL_CHUNK):
        if request.is_cancelled():
            return None
        chunk = prompt[start : start + PREFILL_CHUNK]
        output = target.forward(chunk.tolist(), state.cache)
        state.append(chunk)
        request.on_prefill(start + len(chunk) - kept, len(prompt) - kept)
    assert output is not None
    state.pivot = output.features[-1]
    return Prefilled(output.logits[-1], kept)


def _token_budget(target: Target, request: Request) -> int:
    room = target.max_positions - len(request.prompt_ids)
    if not len(request.prompt_ids):
        raise ContextLengthError("the prompt is empty; expected at least one token")
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {len(request.prompt_ids)} tokens and the model's context {target.max_positions}; "
            "shorten the conversation"
        )
    return min(request.max_new_tokens, room)


def _first(target: Target, state: TargetState, request: Request) -> Step | None:
    """Prefill and draw the first token; None if cancelled."""
    start = time.perf_counter()
    prompt = prefill(target, state, request)
    if prompt is None:
        return None
    constraint = request.constraint
    bitmask = None if constraint is None else constraint.bitmask()
    token = draw(prompt.logits, request.sampling, position=len(state.ids), bitmask=bitmask)
    _accept(state, request, (token,))
    return Step(
        (token,),
        ("prefill",),
        target_seconds=time.perf_counter() - start,
        num_reused=prompt.num_reused,
        num_prefilled=len(request.prompt_ids) - prompt.num_reused,
    )


def _accept(state: TargetState, request: Request, tokens: Sequence[int]) -> None:
    """Make tokens part of the text."""
    state.append(tokens)
    if request.constraint is not None:
        for token in tokens:
            if token not in request.end_ids:
                request.constraint.advance(token)


def _speculate(target: Target, state: TargetState, drafter: Drafter, request: Request, *, room: int) -> Step:
    """Draft, verify, and leave the state at what the target agreed with."""
    start = time.perf_counter()
    draft = _propose(state, drafter, request, room=room)
    drafted = time.perf_counter()
    num_rows = state.num_rows
    anchor = int(state.ids[-1])
    rows = len(draft.tokens) + 1
    try:
        output = target.forward([anchor, *draft.tokens], state.cache, num_logits=rows, num_features=rows)
        verdict = verify(
            output.logits,
            draft.tokens,
            request.sampling,
            position=len(state.ids),
            end_ids=request.end_ids,
            bitmask_at=lambda k: draft.bitmasks[k],
        )
    except BaseException:
        state.cache.crop_to(num_rows)
        raise
    accepted = verdict.num_accepted if verdict.has_bonus else verdict.num_accepted - 1  # an end token stays the anchor
    state.cache.crop_to(num_rows + accepted + 1)
    state.pivot = output.features[accepted]
    _accept(state, request, verdict.tokens)
    sources = draft.sources[: verdict.num_accepted] + (["bonus"] if verdict.has_bonus else [])
    return Step(
        verdict.tokens,
        tuple(sources),
        num_proposed=len(draft.tokens),
        draft_seconds=drafted - start,
        target_seconds=time.perf_counter() - drafted,
    )


def _propose(state: TargetState, drafter: Drafter, request: Request, *, room: int) -> _Draft:
    """Draft up to `room` tokens: what the grammar forces, then what the drafter proposes, then what that forces.

    The constraint walks along the draft, collecting the mask of every position, and is rolled back to where it was.
    """
    constraint = request.constraint
    draft = _Draft([], [], [None if constraint is None else constraint.bitmask()])
    has_drafted = False
    try:
        while len(draft.tokens) < room:
            proposal = _forced(constraint, room - len(draft.tokens))
            if not proposal.tokens:
                if has_drafted:
                    break
                has_drafted = True
                proposal = drafter.propose(DraftView(state.ids, draft.tokens, state.pivot, room - len(draft.tokens)))
            if not _extend(draft, proposal, request, room=room):
                break
    finally:
        if constraint is not None:
            constraint.rollback(len(draft.tokens) - int(_ends(draft, request)))
    return draft


def _forced(constraint: TokenConstraint | None, limit: int) -> Proposal:
    return Proposal(() if constraint is None else constraint.forced(limit), "forced")


def _ends(draft: _Draft, request: Request) -> bool:
    return bool(draft.tokens) and draft.tokens[-1] in request.end_ids


def _extend(draft: _Draft, proposal: Proposal, request: Request, *, room: int) -> bool:
    """Add the tokens that the grammar allows; returns whether the draft may go on behind them."""
    constraint = request.constraint
    for token in proposal.tokens[: room - len(draft.tokens)]:
        if constraint is not None and not constraint.allows(token):
            return False
        is_end = token in request.end_ids
        if constraint is not None and not is_end:
            constraint.advance(token)
        draft.tokens.append(token)
        draft.sources.append(proposal.source)
        draft.bitmasks.append(None if constraint is None or is_end else constraint.bitmask())
        if is_end:
            return False
    return bool(proposal.tokens)
