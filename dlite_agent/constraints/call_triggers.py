"""What ends free text: the beginning of a call, of which there are many spellings, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from dlite_agent.constraints.held_text import GrammarConstraint, Trigger
from dlite_agent.constraints.vocabulary import Vocabulary
from dlite_agent.errors import GrammarError
from dlite_agent.prompting.dialects import Dialect
from dlite_agent.prompting.grammars import CallGrammars
from dlite_agent.prompting.heads import Head, HeadState, answer_start, scan_head

_MAX_HEAD = 512
"""A bare call that has not named its tool after so many bytes is none."""


class CallTrigger:
    """Finds the beginning of a call in free text, and starts the grammar there."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        grammars: CallGrammars,
        compile_grammar: Callable[[str], Any],
        *,
        is_thinking: bool,
    ) -> None:
        self.vocabulary = vocabulary
        self._grammars = grammars
        self._compile = compile_grammar
        self._is_thinking = is_thinking
        self._tag = grammars.dialect.call_open.encode()
        self._names = [name.encode() for name in grammars.names]

    def start(self, text: bytes, *, since: int) -> GrammarConstraint | None:
        """The call's constraint if the bytes from `since` on complete the beginning of a call, else None.

        Raises:
            GrammarError: They do, and go on as no call can.
        """
        answer = self._answer_start(text)
        if answer < 0:
            return None
        position = text.find(self._tag, max(answer, since - len(self._tag) + 1))
        if position >= 0:
            matcher = self._prime(self._grammars.tagged(), text[position:])
        else:
            head = self._scan_head(text[answer:])
            if head.state is not HeadState.CALL:
                return None
            matcher = self._prime(self._grammars.bare(head), text[answer + head.start :])
        if matcher is None:
            raise GrammarError(f"{text[since:].decode(errors='replace')!r} begins a tool call and then breaks it")
        return GrammarConstraint(self.vocabulary, matcher)

    def find_vetoed(self, text: bytes) -> list[int]:
        """The tokens that would begin a call after this text and go on as no call can."""
        answer = self._answer_start(text)
        if answer < 0:  # only a token that also ends the thinking can begin a call
            return [i for i in {*self._vetoed_whole_tags, *self._whole_names} if _is_broken_by(self, text, i)]
        vetoed = list(self._vetoed_whole_tags)
        partial = next((size for size in range(len(self._tag) - 1, 0, -1) if text.endswith(self._tag[:size])), 0)
        if partial:
            endings = self.vocabulary.starting_with(self._tag[partial:])
            vetoed += self._refused(self._grammars.tagged(), self._tag[:partial], endings)
        head = self._scan_head(text[answer:])
        if head.state is HeadState.OPEN:
            vetoed += self._find_vetoed_heads(text, answer, head)
        return vetoed

    def _find_vetoed_heads(self, text: bytes, answer: int, head: Head) -> list[int]:
        if head.typed is None:
            return [token_id for token_id in self._whole_names if _is_broken_by(self, text, token_id)]
        typed = head.typed.encode("latin-1")
        endings = [name[len(typed) :] + b'"' for name in self._names if name.startswith(typed)]
        candidates = [token_id for ending in endings for token_id in self.vocabulary.starting_with(ending)]
        return self._refused(self._grammars.bare(head), text[answer + head.start :], candidates)

    def _refused(self, grammar: str, prefix: bytes, candidates: Sequence[int]) -> list[int]:
        """The candidates that the grammar does not accept after the prefix, be they its canonical tokens or not."""
        matcher = self._prime(grammar, prefix) if candidates else None
        return [token_id for token_id in candidates if matcher is None or not matcher.validate_tokens([token_id])]

    def _prime(self, grammar: str, prefix: bytes) -> Any | None:
        """The grammar's matcher after the bytes, however they were tokenized; None if it does not allow them."""
        matcher = self._compile(grammar)
        ids = self.vocabulary.ll_tokenizer.tokenize_bytes(prefix)
        if matcher.validate_tokens(ids) < len(ids) or not matcher.consume_tokens(ids):
            return None
        return matcher

    def _answer_start(self, text: bytes) -> int:
        thinking = self._grammars.dialect.thinking
        return answer_start(text.decode("latin-1"), thinking, is_thinking=self._is_thinking)

    def _scan_head(self, text: bytes) -> Head:
        """Heads are found in bytes, as one character per byte: a token may end in the middle of a character."""
        if len(text) > _MAX_HEAD:
            return Head(HeadState.NO)
        names = [name.decode("latin-1") for name in self._names]
        return scan_head(text.decode("latin-1"), self._grammars.dialect, names)

    @cached_property
    def _vetoed_whole_tags(self) -> list[int]:
        whole = self.vocabulary.containing(self._tag)
        return [token_id for token_id in whole if _is_broken_by(self, b"", token_id)]

    @cached_property
    def _whole_names(self) -> list[int]:
        return sorted({token_id for name in self._names for token_id in self.vocabulary.containing(name + b'"')})


class NoCall:
    """A trigger that nothing may pull: no text begins a call."""

    def __init__(self, vocabulary: Vocabulary, dialect: Dialect, *, is_thinking: bool) -> None:
        self.vocabulary = vocabulary
        self._thinking, self._is_thinking = dialect.thinking, is_thinking
        self._tag = dialect.call_open.encode()

    def start(self, text: bytes, *, since: int) -> None:
        """Refuse the beginning of a call.

        Raises:
            GrammarError: The bytes from `since` on complete it.
        """
        answer = answer_start(text.decode("latin-1"), self._thinking, is_thinking=self._is_thinking)
        if answer >= 0 and text.find(self._tag, max(answer, since - len(self._tag) + 1)) >= 0:
            raise GrammarError(f"{text[since:].decode(errors='replace')!r} begins a tool call, and none may be made")

    def find_vetoed(self, text: bytes) -> list[int]:
        """The tokens that would complete the beginning of a call after this text."""
        sizes = (size for size in range(1, len(self._tag)) if text.endswith(self._tag[:size]))
        endings = [i for size in sizes for i in self.vocabulary.starting_with(self._tag[size:])]
        return [i for i in {*endings, *self.vocabulary.containing(self._tag)} if _is_broken_by(self, text, i)]


def _is_broken_by(trigger: Trigger, text: bytes, token_id: int) -> bool:
    """Whether a token may not follow a text: it would begin a call, and go on as none can or begin one at all."""
    try:
        trigger.start(text + trigger.vocabulary.tokens[token_id], since=len(text))
    except GrammarError:
        return True
    return False
