"""What a model thinks before it answers, split from the answer while it streams in."""

from __future__ import annotations

from dlite_agent.prompting.spans import SPACE, overlap


class ThinkingSplit:
    """Splits one reply into thinking and answer.

    Thinking comes first or not at all. The tags and the white space around it belong to neither part.

    Args:
        tags: What opens thinking and what closes it.
        is_thinking: The prompt has opened it already.

    Attributes:
        num_chars: Characters of the reply so far that are not the answer: thinking, tags, white space around them.
    """

    def __init__(self, tags: tuple[str, str], *, is_thinking: bool) -> None:
        self._opener, self._closer = tags
        self._held = ""
        self._is_open = is_thinking
        self._is_answer = False
        self._has_thought = False  # something of the thinking was given out
        self._skips_space = False  # behind the closing tag
        self.num_chars = 0

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next piece of the reply; returns what has become certain of the thinking and of the answer."""
        self._held += text
        if not self._is_open and not self._is_answer:
            self._find_beginning()
        thought = self._take_thought() if self._is_open else ""
        return thought, self._take_answer() if self._is_answer else ""

    def close(self) -> tuple[str, str]:
        """End the reply; returns what was held back."""
        held, self._held = self._held, ""
        if not self._is_open:
            return "", held
        self.num_chars += len(held)
        return held.rstrip(SPACE) if self._has_thought else held.strip(SPACE), ""

    def _find_beginning(self) -> None:
        begun = self._held.lstrip(SPACE)
        if begun.startswith(self._opener):
            self._is_open = True
            self._drop(len(self._held) - len(begun) + len(self._opener))
        elif not self._opener.startswith(begun):
            self._is_answer = True

    def _take_thought(self) -> str:
        end = self._held.find(self._closer)
        if end >= 0:
            thought = self._drop(end).rstrip(SPACE)
            self._drop(len(self._closer))
            self._is_open, self._is_answer, self._skips_space = False, True, True
        else:
            size = overlap(self._held, self._closer)
            thought = self._drop(len(self._held[: len(self._held) - size].rstrip(SPACE)))
        thought = thought if self._has_thought else thought.lstrip(SPACE)
        self._has_thought = self._has_thought or bool(thought)
        return thought

    def _take_answer(self) -> str:
        answer, self._held = self._held, ""
        if self._skips_space:
            size = len(answer)
            answer = answer.lstrip(SPACE)
            self.num_chars += size - len(answer)
            self._skips_space = not answer
        return answer

    def _drop(self, size: int) -> str:
        dropped, self._held = self._held[:size], self._held[size:]
        self.num_chars += size
        return dropped
