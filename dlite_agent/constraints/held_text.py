"""Constraints: what walks along a reply token by token, runs ahead along a draft and is rolled back."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from dlite_agent.bitmask import Bitmask, has_token, only_token
from dlite_agent.constraints.vocabulary import Vocabulary
from dlite_agent.errors import GrammarError


class GrammarConstraint:
    """A grammar from the first token on."""

    def __init__(self, vocabulary: Vocabulary, matcher: Any) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._mask: Bitmask | None = None
        self._num_ends = 0  # end tokens are counted, not consumed
        self.num_advanced = 0

    @property
    def finished(self) -> bool:
        """Whether only end tokens may follow."""
        return not np.any(self.bitmask() & ~self._vocabulary.eos_mask)

    def bitmask(self) -> Bitmask:
        """Return which tokens may follow."""
        if self._num_ends:
            return self._vocabulary.eos_mask
        if self._mask is None:
            self._mask = self._vocabulary.mask_of_matcher(self._matcher)
        return self._mask

    def allows(self, token_id: int) -> bool:
        """Say whether a token may follow."""
        return has_token(self.bitmask(), token_id)

    def advance(self, token_id: int) -> None:
        """Take a token; raises `GrammarError` for one that may not follow."""
        if not self.allows(token_id):
            raise GrammarError(f"token {token_id} ({self._describe(token_id)}) may not follow here")
        if token_id in self._vocabulary.eos_ids:
            self._num_ends += 1
        elif not self._matcher.consume_token(token_id):
            raise GrammarError(f"the grammar failed at an allowed token: {self._matcher.get_error()}")
        else:
            self._mask = None
        self.num_advanced += 1

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens; raises `GrammarError` if there are fewer."""
        if not 0 <= num_tokens <= self.num_advanced:
            raise GrammarError(f"cannot roll back {num_tokens} tokens; {self.num_advanced} were advanced")
        num_ends = min(num_tokens, self._num_ends)
        self._num_ends -= num_ends
        self.num_advanced -= num_tokens
        if num_tokens > num_ends:
            self._mask = None
            if not self._matcher.rollback(num_tokens - num_ends):
                raise GrammarError(f"the grammar cannot be rolled back: {self._matcher.get_error()}")

    def forced(self, limit: int) -> list[int]:
        """Return the tokens that must follow, at most `limit`."""
        tokens: list[int] = []
        while len(tokens) < limit and (only := only_token(self.bitmask())) is not None:
            if only in self._vocabulary.eos_ids:
                break
            self.advance(only)
            tokens.append(only)
        self.rollback(len(tokens))
        return tokens

    def _describe(self, token_id: int) -> str:
        is_known = 0 <= token_id < len(self._vocabulary.tokens)
        return repr(self._vocabulary.tokens[token_id].decode(errors="replace")) if is_known else "unknown"


class Trigger(Protocol):
    """Finds what ends free text."""

    vocabulary: Vocabulary

    def start(self, text: bytes, *, since: int) -> GrammarConstraint | None:
        """Return what holds the reply from now on, if the bytes from `since` on end the free text, else None."""
        ...

    def find_vetoed(self, text: bytes) -> list[int]:
        """Return the tokens that may not follow this text."""
        ...


class TriggeredConstraint:
    """Free text until a call begins; from there on the call's grammar."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger
        self._vocabulary = trigger.vocabulary
        self._text = bytearray()
        self._lengths: list[int] = []  # of the text before each free token
        self._num_ends = 0
        self._held: GrammarConstraint | None = None

    @property
    def finished(self) -> bool:
        """Whether only end tokens may follow."""
        return self._held.finished if self._held else self._num_ends > 0

    def bitmask(self) -> Bitmask | None:
        """Return which tokens may follow; None for all."""
        if self._held:
            return self._held.bitmask()
        if self._num_ends:
            return self._vocabulary.eos_mask
        vetoed = self._trigger.find_vetoed(bytes(self._text))
        return self._vocabulary.every_mask & ~self._vocabulary.mask_of_ids(vetoed) if vetoed else None

    def allows(self, token_id: int) -> bool:
        """Say whether a token may follow."""
        mask = self.bitmask()
        return 0 <= token_id < self._vocabulary.vocab_size if mask is None else has_token(mask, token_id)

    def advance(self, token_id: int) -> None:
        """Take a token; raises `GrammarError` for one that may not follow."""
        if self._held:
            self._held.advance(token_id)
            return
        if not 0 <= token_id < self._vocabulary.vocab_size:
            raise GrammarError(f"token {token_id} is not in the vocabulary of {self._vocabulary.vocab_size}")
        is_end = token_id in self._vocabulary.eos_ids
        if self._num_ends and not is_end:
            raise GrammarError(f"token {token_id} follows an end token")
        length = len(self._text)
        if is_end:
            self._num_ends += 1
        else:
            text = bytes(self._text) + self._vocabulary.tokens[token_id]
            self._held = self._trigger.start(text, since=length)
            self._text[length:] = text[length:]
        self._lengths.append(length)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens; raises `GrammarError` if there are fewer."""
        num_held = self._held.num_advanced if self._held else 0
        num_free = num_tokens - num_held
        if not 0 <= num_tokens <= num_held + len(self._lengths):
            raise GrammarError(f"cannot roll back {num_tokens} tokens; {num_held + len(self._lengths)} were advanced")
        if num_free <= 0:
            if self._held:
                self._held.rollback(num_tokens)
            return
        self._held = None
        self._num_ends = max(0, self._num_ends - num_free)
        del self._text[self._lengths[-num_free] :]
        del self._lengths[-num_free:]

    def forced(self, limit: int) -> list[int]:
        """Return the tokens that must follow, at most `limit`."""
        return self._held.forced(limit) if self._held else []
