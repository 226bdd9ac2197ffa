"""Grammars given by the set of tokens that may follow a path."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

END = 159
VOCAB = 160
Rule = Callable[[Sequence[int]], Collection[int]]


class RuleConstraint:
    """A grammar given by the set of tokens that may follow a path."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.path: list[int] = []

    @property
    def finished(self) -> bool:
        return set(self.rule(self.path)) == {END}

    def bitmask(self) -> npt.NDArray[np.int32]:
        bits = np.zeros(VOCAB, dtype=np.uint8)
        bits[list(self.rule(self.path))] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def allows(self, token_id: int) -> bool:
        return token_id in self.rule(self.path)

    def advance(self, token_id: int) -> None:
        assert token_id != END  # the engine does not hand end tokens on
        assert self.allows(token_id)
        self.path.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= len(self.path)
        del self.path[len(self.path) - num_tokens :]

    def forced(self, limit: int) -> list[int]:
        path = list(self.path)
        while len(path) - len(self.path) < limit:
            allowed = set(self.rule(path))
            if len(allowed) > 1 or END in allowed:
                break
            path += allowed
        return path[len(self.path) :]


def even(path: Sequence[int]) -> Collection[int]:
    return range(0, VOCAB, 2)


def free_then_forced(path: Sequence[int]) -> Collection[int]:
    """Three free tokens, then 7 8 9, and so on."""
    return range(VOCAB - 1) if len(path) % 6 < 3 else {4 + len(path) % 6}


def even_or_end(path: Sequence[int]) -> Collection[int]:
    return [*range(0, VOCAB, 2), END]


def ten_then_end(path: Sequence[int]) -> Collection[int]:
    return range(50, 100) if len(path) < 10 else {END}


def may_end(path: Sequence[int]) -> Collection[int]:
    """Forced, free, and from the ninth token on an end token is one of two choices."""
    if len(path) < 4:
        return {20 + len(path)}
    return range(1, 60) if len(path) < 8 else {END, 3}


def at_once_forced_to_the_end(path: Sequence[int]) -> Collection[int]:
    return {30 + len(path)} if len(path) < 9 else {END}


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (even, even_or_end, free_then_forced, ten_then_end, may_end, at_once_forced_to_the_end)
}
