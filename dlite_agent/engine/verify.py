"""Verification: which of the drafted tokens stay, and which token follows them.

Two ways. *Exact* keeps a drafted token if it is the target's own draw at its position, so that the text for a seed is
the same with any draft. *Rejection* (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318) keeps
it with probability min(1, p / q) and else draws from what p has more than q, so that the text follows the target's
distribution, and more is kept. Both are pure functions: all chance comes from (seed, position).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dlite_agent.bitmask import Bitmask
from dlite_agent.engine.processors import Sampler
from dlite_agent.engine.sampling import argmax_tokens, derived_seed, distribution, gumbel_noise, undrawable

_MASS_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the target thought of one token and of its rivals, before any processing and at temperature 1.

    Attributes:
        token: The token that was drawn.
        logprob: Its natural log-probability.
        top: The most likely tokens and their log-probabilities, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a draft.

    Attributes:
        tokens: The accepted draft tokens and, unless an end token was accepted, one bonus token.
        num_accepted: How many of `tokens` were drafted.
        logprobs: One for each of `tokens`, of the target's raw logits; empty unless `top_logprobs` asks for them.
    """

    tokens: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def has_bonus(self) -> bool:
        """True if the last token was not drafted."""
        return len(self.tokens) > self.num_accepted


@dataclass(frozen=True, slots=True)
class _Pass:
    """The rows of one verify pass, and what each of them is judged by."""

    logits: torch.Tensor  # [len(draft) + 1, vocab]
    draft: Sequence[int]
    sampler: Sampler
    position: int
    bitmask_at: Callable[[int], Bitmask | None]

    def draw(self, k: int) -> int:
        """Draw the target's own token behind k drafted ones."""
        return self.sampler.draw(
            self.logits[k], position=self.position + k, drafted=self.draft[:k], bitmask=self.bitmask_at(k)
        )

    def distribution(self, k: int) -> torch.Tensor:
        """Return the float64 probabilities `[vocab]` of the target's token behind k drafted ones."""
        processed = self.sampler.process(self.logits[k], self.draft[:k], bitmask=self.bitmask_at(k))
        p = distribution(processed, self.sampler.params)
        if not float(p.sum()) > 0.0:  # NaN
            raise undrawable(processed, position=self.position + k)
        return p


def verify(
    logits: torch.Tensor,  # [len(draft) + 1, vocab]: row k follows k drafted tokens
    draft: Sequence[int],
    sampler: Sampler,
    *,
    position: int,
    bitmask_at: Callable[[int], Bitmask | None] = lambda _: None,
    distributions: Sequence[torch.Tensor | None] = (),
) -> Verdict:
    """Judge a draft, which may be empty. The sampler is not advanced.

    For rejection the length of a draft must not depend on the value of the token it was cut before: a token that was
    sampled but dropped because a grammar forbids it, say, biases what follows. Leave such a token at the draft's end;
    its p is 0, and the residual takes its place.

    Args:
        logits: Target logits of the anchor's row and of each drafted token's row.
        draft: Proposed tokens.
        sampler: How the target draws, and behind which text.
        position: Position of the first drafted token in the text.
        bitmask_at: Grammar mask after k drafted tokens, or None where all tokens are allowed.
        distributions: For rejection: nothing, or for each drafted token the probabilities `[vocab]` it was sampled
            from, or None if it was chosen without chance. Not looked at in exact mode and when greedy.

    Raises:
        ValueError: As `check_distributions`.
        GrammarError: No token may follow.
        CorruptModelError: The logits are NaN.
    """
    params = sampler.params
    rows = _Pass(logits, draft, sampler, position, bitmask_at)
    if params.verification == "rejection" and not params.is_greedy:
        check_distributions(draft, distributions, logits.shape[-1])
        tokens, num_accepted = _by_rejection(rows, distributions)
    else:
        tokens, num_accepted = _by_comparison(rows)
    if params.top_logprobs is None:
        return Verdict(tokens, num_accepted)
    return Verdict(tokens, num_accepted, token_logprobs(logits[: len(tokens)], tokens, num_top=params.top_logprobs))


def token_logprobs(
    logits: torch.Tensor,  # [len(tokens), vocab]
    tokens: Sequence[int],
    *,
    num_top: int,
) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of tokens and of the `num_top` most likely ones under raw target logits."""
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    own = log_p.gather(-1, torch.tensor(tokens, device=log_p.device).unsqueeze(-1)).flatten().tolist()
    best = torch.topk(log_p, min(num_top, log_p.shape[-1]), dim=-1)
    ids, values = best.indices.tolist(), best.values.tolist()
    return tuple(
        TokenLogprobs(token, own[k], tuple(zip(ids[k], values[k], strict=True))) for k, token in enumerate(tokens)
    )


def check_distributions(draft: Sequence[int], distributions: Sequence[torch.Tensor | None], vocab_size: int) -> None:
    """Refuse distributions that drafted tokens cannot have been sampled from.

    Args:
        draft: Proposed tokens.
        distributions: Nothing, or for each token its probabilities `[vocab]` or None.
        vocab_size: Width of the target's logits.

    Raises:
        ValueError: There are too many or too few; one has another size, is not finite, is negative or does not sum to
            1; or the drafted token has a probability of 0.
    """
    if distributions and len(distributions) != len(draft):
        raise ValueError(
            f"{len(distributions)} distributions for {len(draft)} drafted tokens; expected as many or none"
        )
    for k, (token, q) in enumerate(zip(draft, distributions, strict=False)):
        if q is None:
            continue
        if q.shape != (vocab_size,):
            raise ValueError(f"distribution {k} has shape {list(q.shape)}; expected [{vocab_size}]")
        if not 0 <= token < vocab_size:
            raise ValueError(f"drafted token {k} is {token}; expected an id below {vocab_size}")
        mass, least, own = torch.stack([q.float().sum(), q.min().float(), q[token].float()]).tolist()
        if not (abs(mass - 1.0) <= _MASS_TOLERANCE and least >= 0.0):  # false for NaN, too
            raise ValueError(f"distribution {k} sums to {mass}, its least is {least}; expected 1 and 0 or more")
        if not own > 0.0:
            raise ValueError(f"distribution {k} gives the drafted token {token} a probability of 0; expected above 0")


def _by_comparison(rows: _Pass) -> tuple[tuple[int, ...], int]:
    """Accept drafted tokens while each is the target's own draw."""
    tokens: list[int] = []
    for k, token in enumerate(_own_draws(rows)):
        tokens.append(token)
        if k == len(rows.draft) or token != rows.draft[k]:
            return tuple(tokens), k
        if token in rows.sampler.end_ids:
            break
    return tuple(tokens), len(tokens)


def _own_draws(rows: _Pass) -> Iterator[int]:
    """Yield what the target draws in each row; of the next row only when asked."""
    num_rows = len(rows.draft) + 1
    is_plain = rows.sampler.params.is_greedy and not rows.sampler.is_active
    if not is_plain or any(rows.bitmask_at(k) is not None for k in range(num_rows)):
        yield from (rows.draw(k) for k in range(num_rows))
        return
    for k, token in enumerate(argmax_tokens(rows.logits)):
        if token < 0:
            raise undrawable(rows.logits[k], position=rows.position + k)
        yield token


def _by_rejection(rows: _Pass, distributions: Sequence[torch.Tensor | None]) -> tuple[tuple[int, ...], int]:
    """Accept each drafted token with probability min(1, p / q), until one is rejected."""
    seed, draft = rows.sampler.params.seed, rows.draft
    for k, token in enumerate(draft):
        p = rows.distribution(k)
        q = _sampled_from(distributions[k] if distributions else None, token, p)
        if _uniform(seed, rows.position + k) * float(q[token]) >= float(p[token]):
            return (*draft[:k], _draw_residual(_residual(p, q), seed, rows.position + k)), k
        if token in rows.sampler.end_ids:
            return tuple(draft[: k + 1]), k + 1
    return (*draft, rows.draw(len(draft))), len(draft)


def _sampled_from(q: torch.Tensor | None, token: int, p: torch.Tensor) -> torch.Tensor:
    """Return the float64 distribution of a drafted token, a point mass if it has none, where p is."""
    if q is None:
        return torch.zeros_like(p).index_fill_(0, torch.tensor(token, device=p.device), 1.0)
    q = q.to(p.device).double()
    return q / q.sum()


def _uniform(seed: int, position: int) -> float:
    """Return the number from (0, 1) that decides over the drafted token at a position."""
    return ((derived_seed(seed, "acceptance", position) >> 11) + 0.5) * 2.0**-52


def _residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return what p has more than q, not normalised; p itself where that is nothing but rounding."""
    residual = (p - q).clamp_(min=0.0)
    return residual if float(residual.sum()) > 0.0 else p


def _draw_residual(weights: torch.Tensor, seed: int, position: int) -> int:
    """Draw from weights `[vocab]`, with noise that no other draw uses."""
    ids = weights.nonzero().flatten()
    noise = gumbel_noise(ids, seed=derived_seed(seed, "residual"), position=position)
    return int(ids[torch.argmax(weights[ids].log() + noise)])
