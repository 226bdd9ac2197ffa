"""What the text so far does to the target's logits: penalties, bias, bad words, a least length, the grammar.

A `Sampler` holds just what of a text matters to its next token. It is told what became text with `advance`; verifying
a draft never moves it, since every row of a verify pass is processed with the drafted tokens before it as an argument.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from dlite_agent.bitmask import Bitmask
from dlite_agent.engine.sampling import SamplingParams, allowed_tokens, draw, keep_allowed
from dlite_agent.errors import ConfigError


class Sampler:
    """Draws the tokens of one text.

    Attributes:
        params: How tokens are drawn.
        end_ids: Tokens that end the text.
        num_generated: Tokens of the text so far, without the prompt.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        end_ids: frozenset[int] = frozenset(),
        generated: Sequence[int] = (),
    ) -> None:
        """Start behind a prompt and, when a text is resumed, what was `generated` of it before."""
        self.params = params
        self.end_ids = end_ids
        self.num_generated = 0
        self._has_penalties = params.repetition_penalty != 1.0 or bool(
            params.presence_penalty or params.frequency_penalty
        )
        self._prompt_ids = prompt_ids
        self._history: _History | None = None
        self._uncounted: list[int] = []  # generated, not yet in the history
        self._bad_words = _BadWords(params.bad_words)
        self._tail = self._bad_words.tail(prompt_ids)
        self.advance(generated)

    @property
    def is_active(self) -> bool:
        """True if `process` changes logits even without a grammar."""
        params = self.params
        return (
            self._has_penalties
            or bool(params.logit_bias)
            or bool(params.bad_words)
            or (self.num_generated < params.min_tokens and bool(self.end_ids))
        )

    def advance(self, tokens: Sequence[int]) -> None:
        """Take note that tokens became text."""
        self.num_generated += len(tokens)
        if self._has_penalties:
            self._uncounted.extend(int(token) for token in tokens)
        if self.params.bad_words:
            self._tail = self._bad_words.tail([*self._tail, *tokens])

    def process(
        self, logits: torch.Tensor, drafted: Sequence[int] = (), *, bitmask: Bitmask | None = None
    ) -> torch.Tensor:
        """Return the target's `logits [vocab]` as the text and the `drafted` tokens behind it leave them.

        The argument is not written to; it is returned itself where nothing changes. Where a grammar would leave only
        tokens that something else forbids, the grammar wins: min_tokens gives way first, bad words second.

        Raises:
            GrammarError: The grammar allows no token.
            ConfigError: A bias or bad word is not in the vocabulary, or bad words forbid every token.
        """
        if not self.is_active:
            return logits if bitmask is None else keep_allowed(logits, allowed_tokens(bitmask, logits.shape[-1]))
        self._check_vocabulary(logits.shape[-1])
        return self._masked(self._biased(self._penalised(logits, drafted)), drafted, bitmask=bitmask)

    def draw(
        self, logits: torch.Tensor, *, position: int, drafted: Sequence[int] = (), bitmask: Bitmask | None = None
    ) -> int:
        """Draw the token at `position`, behind the text and the `drafted` tokens, from the target's `logits [vocab]`.

        Raises:
            GrammarError: No token may follow.
            ConfigError: A bias or bad word is not in the vocabulary, or bad words forbid every token.
            CorruptModelError: The logits are NaN.
        """
        return draw(self.process(logits, drafted, bitmask=bitmask), self.params, position=position)

    def _check_vocabulary(self, vocab_size: int) -> None:
        for name, largest in (
            ("logit_bias", max(self.params.logit_bias, default=0)),
            ("bad_words", self._bad_words.largest_id),
        ):
            if largest >= vocab_size:
                raise ConfigError(f"{name} has token id {largest}; expected ids below {vocab_size}")

    def _penalised(self, logits: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
        if not self._has_penalties:
            return logits
        params = self.params
        logits = _single(logits)
        if self._history is None:
            self._history = _History(logits, self._prompt_ids)
        self._history.add(self._uncounted)
        self._uncounted.clear()
        counts = self._history.counts_with(drafted)
        if params.repetition_penalty != 1.0:
            scaled = torch.where(logits < 0, logits * params.repetition_penalty, logits / params.repetition_penalty)
            logits = torch.where(self._history.is_in_prompt | (counts > 0), scaled, logits)
        if params.presence_penalty or params.frequency_penalty:
            logits = logits - ((counts > 0) * params.presence_penalty + counts * params.frequency_penalty)
        return logits

    def _biased(self, logits: torch.Tensor) -> torch.Tensor:
        bias = self.params.logit_bias
        if not bias:
            return logits
        logits = _single(logits)
        ids = torch.tensor(list(bias), device=logits.device)
        return logits.index_add(0, ids, torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device))

    def _masked(self, logits: torch.Tensor, drafted: Sequence[int], *, bitmask: Bitmask | None) -> torch.Tensor:
        vocab_size = logits.shape[-1]
        bad = self._bad_words.completing([*self._tail, *drafted])
        is_early = self.num_generated + len(drafted) < self.params.min_tokens
        early_ends = {token for token in self.end_ids if token < vocab_size} if is_early else set()
        if bitmask is None:
            return _without(logits, bad | early_ends)
        allowed = allowed_tokens(bitmask, vocab_size)
        for forbidden in (bad | early_ends, bad, early_ends):
            rest = allowed.copy()
            rest[list(forbidden)] = False
            if rest.any():
                return keep_allowed(logits, rest)
        return keep_allowed(logits, allowed)


class _History:
    """Which tokens a prompt holds and how often each was generated, kept on the logits' device.

    Counts, not penalties, are kept: they are whole numbers, so that a drafted token and the same token once it is text
    lead to the same bits.
    """

    def __init__(self, logits: torch.Tensor, prompt_ids: Sequence[int]) -> None:
        self.is_in_prompt = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        self.is_in_prompt[self._ids(prompt_ids)] = True
        self.counts = torch.zeros_like(logits)

    def _ids(self, tokens: Iterable[int]) -> torch.Tensor:
        return torch.tensor([int(token) for token in tokens], dtype=torch.int64, device=self.is_in_prompt.device)

    def add(self, tokens: Sequence[int]) -> None:
        """Count generated tokens."""
        if tokens:
            self.counts.index_add_(0, self._ids(tokens), self.counts.new_ones(len(tokens)))

    def counts_with(self, drafted: Sequence[int]) -> torch.Tensor:
        """Return the counts `[vocab]` as they would be with drafted tokens."""
        if not drafted:
            return self.counts
        return self.counts.index_add(0, self._ids(drafted), self.counts.new_ones(len(drafted)))


class _BadWords:
    """Finds the tokens that would complete a bad word, by what precedes them."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._last_ids: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for word in words:
            self._last_ids[tuple(word[:-1])].add(word[-1])
        self._lengths = sorted({len(prefix) for prefix in self._last_ids})
        self.largest_id = max((max(word) for word in words), default=0)

    def tail(self, text: Sequence[int]) -> list[int]:
        """Return as much of the text's end as matters."""
        length = self._lengths[-1] if self._lengths else 0
        return [int(token) for token in text[len(text) - min(length, len(text)) :]]

    def completing(self, text: Sequence[int]) -> set[int]:
        """Return the tokens that complete a bad word behind a text."""
        found: set[int] = set()
        for length in self._lengths:
            if length <= len(text):
                found |= self._last_ids.get(tuple(text[len(text) - length :]), set())
        return found


def _single(logits: torch.Tensor) -> torch.Tensor:
    """Return logits of half precision in single precision."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _without(logits: torch.Tensor, forbidden: set[int]) -> torch.Tensor:
    """Return `logits [vocab]` with the forbidden tokens at minus infinity."""
    if not forbidden:
        return logits
    if len(forbidden) == logits.shape[-1]:
        raise ConfigError("bad_words and min_tokens forbid every token; expected one at least to be left")
    return logits.index_fill(0, torch.tensor(sorted(forbidden), device=logits.device), -torch.inf)
