"""Which tokens made which characters of a reply, and their log-probabilities in OpenAI's form."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlite_agent.engine.verify import TokenLogprobs
    from dlite_agent.prompting.encoding import TokenBytes

_IMPOSSIBLE = -9999.0  # in place of minus infinity, which JSON does not have


class TokenTrail:
    """The tokens of one reply, along its text. A token that completes no character ends where the character does."""

    def __init__(self) -> None:
        self._length = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._entries: list[dict[str, Any]] = []
        self._num_taken = 0

    def add(self, text: str, entry: dict[str, Any] | None = None) -> None:
        """Take note of the next token, the text that it completed and, where asked for, its log-probabilities."""
        self._starts.append(self._length)
        if entry is not None:
            self._entries.append(entry)
        if text:
            self.close(text)

    def close(self, text: str) -> None:
        """Take note of text that belongs to the last tokens."""
        self._length += len(text)
        self._ends += [self._length] * (len(self._starts) - len(self._ends))

    def count(self, num_chars: int) -> int:
        """Return how many tokens begin within so many characters."""
        return bisect_left(self._starts, num_chars)

    def take(self, num_chars: int, *, is_end: bool = False) -> list[dict[str, Any]]:
        """Return the entries, each once, of the tokens that end within so many characters.

        At the reply's end those that begin there are returned, too: a stop string may have cut the last one.
        """
        last = self.count(num_chars) if is_end else bisect_right(self._ends, num_chars)
        first, self._num_taken = self._num_taken, max(self._num_taken, last)
        return self._entries[first : self._num_taken]


def openai_entry(logprobs: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, Any]:
    """Return one element of OpenAI's `logprobs.content`."""
    top = [_describe(token, value, token_bytes) for token, value in logprobs.top]
    return {**_describe(logprobs.token, logprobs.logprob, token_bytes), "top_logprobs": top}


def _describe(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    spelled = token_bytes[token]
    text = spelled.decode("utf-8", errors="replace")
    return {"token": text, "bytes": list(spelled), "logprob": max(logprob, _IMPOSSIBLE)}
