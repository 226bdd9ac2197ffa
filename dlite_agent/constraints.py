"""Grammars over tokens: what may follow, what must follow, and where a grammar starts by itself.

A constraint walks along the reply token by token, runs ahead along a draft and is rolled back. Grammars are written
for llguidance and work on bytes, so that every tokenization of a text is treated alike; only where the text is forced
is its canonical tokenization the one that is allowed.

Under `tool_choice="auto"` a reply is free text until a call begins: with the dialect's tag, or at the very beginning
with a bare (or fenced, or listed) object that names a bound tool. From there on a grammar holds it. Both can happen in
the middle of a token: tokens that would begin a call and go on wrongly are masked out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any, NoReturn

import numpy as np

from dlite_agent.engine.constraint import Bitmask, TokenConstraint
from dlite_agent.errors import GrammarError, UnsupportedSchemaError
from dlite_agent.prompting.dialects import HERMES, Dialect
from dlite_agent.prompting.grammars import CallGrammars
from dlite_agent.prompting.heads import Head, HeadState, answer_start, scan_head
from dlite_agent.prompting.rules import json_rule, schema_text
from dlite_agent.prompting.schemas import subschemas, tool_parameters
from dlite_agent.vocabulary import Vocabulary

_MAX_HEAD = 512
"""A bare call that has not named its tool after so many bytes is none."""

_MAX_COMPILED = 64


class GrammarFactory:
    """Makes constraints for one tokenizer; safe to share between threads, while each constraint has one user.

    Args:
        tokenizer: A transformers fast tokenizer or a `tokenizers.Tokenizer`.
        vocab_size: Length of the target's logits; it may be larger than the tokenizer's vocabulary. Ids that the
            tokenizer does not have are never allowed by a grammar.
        eos_ids: Ids of the tokens that end a reply.

    Raises:
        MissingDependencyError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._vocabulary = Vocabulary(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids)
        self._compiled: dict[str, Any] = {}
        self._lock = Lock()

    def tool_call(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        choice: str = "auto",
        dialect: Dialect = HERMES,
        parallel: bool = True,
        is_thinking: bool = False,
    ) -> TokenConstraint:
        """Hold tool calls to the tools' names and schemas.

        Args:
            tools: OpenAI-style tool dicts. Objects that list their properties are closed to others unless their
                schema says so itself.
            choice: "auto": free text until a call begins. "any": the reply is calls. A tool's name: it is one call of
                that tool.
            dialect: How calls are written.
            parallel: Allow several calls in a reply.
            is_thinking: The prompt has opened the model's thinking: it is closed at once before a forced call, and
                under "auto" there are no calls before its end.

        Raises:
            GrammarError: There are no tools, or `choice` is none of them.
            UnsupportedSchemaError: A tool's schema has a feature that a grammar cannot hold, or that the dialect has no
                grammar for; the message has its path.
        """
        schemas = tool_parameters(tools)
        if choice not in ("auto", "any"):
            schemas = {name: schema for name, schema in schemas.items() if name == choice}
            parallel = False
        if not schemas:
            raise GrammarError(f"tool choice is {choice!r}, which fits none of the {len(tools)} tools")
        grammars = CallGrammars(schemas, dialect, parallel=parallel)
        forced = self._compile(grammars.forced(is_thinking=is_thinking), schemas)
        if choice == "auto":
            trigger = _CallTrigger(self._vocabulary, grammars, self._compile, is_thinking=is_thinking)
            return _TriggeredConstraint(trigger)
        return _GrammarConstraint(self._vocabulary, forced)

    def json_schema(self, schema: Mapping[str, Any]) -> TokenConstraint:
        """Hold the reply to JSON of a schema, closed as a tool's.

        Raises:
            UnsupportedSchemaError: The schema has a feature that a grammar cannot hold; the message has its path.
        """
        return self.lark(f"start: {json_rule(schema)}", {"": schema})

    def regex(self, pattern: str) -> TokenConstraint:
        """Hold the reply to a regular expression (Rust syntax, no look-around), all of it.

        Raises:
            GrammarError: The expression cannot be compiled.
        """
        from llguidance import regex_to_lark

        return self.lark(f"start: /{regex_to_lark(pattern)}/")

    def lark(self, grammar: str, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> TokenConstraint:
        """Hold the reply to a grammar in llguidance's Lark.

        Args:
            grammar: Its rules; the first is `start`.
            schemas: The JSON schemas it was made of, by tool; they are looked through for the reason if it fails.

        Raises:
            UnsupportedSchemaError: A schema has a feature that a grammar cannot hold; the message has its path.
            GrammarError: The grammar cannot be compiled.
        """
        return _GrammarConstraint(self._vocabulary, self._compile(grammar, schemas))

    def _compile(self, lark: str, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
        """A fresh matcher; `schemas` are looked through for the reason if there is none."""
        from llguidance import LLMatcher

        found = self._compiled.get(lark)
        if found is None:
            found = LLMatcher(self._vocabulary.ll_tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
            if found.is_error():
                _raise_unsupported(found.get_error(), schemas or {})
            with self._lock:
                while len(self._compiled) >= _MAX_COMPILED:
                    del self._compiled[next(iter(self._compiled))]
                self._compiled[lark] = found
        return found.deep_copy()


class _GrammarConstraint:
    """A grammar from the first token on."""

    def __init__(self, vocabulary: Vocabulary, matcher: Any) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._mask: Bitmask | None = None
        self._num_ends = 0  # end tokens are counted, not consumed
        self.num_advanced = 0

    @property
    def finished(self) -> bool:
        return not np.any(self.bitmask() & ~self._vocabulary.eos_mask)

    def bitmask(self) -> Bitmask:
        if self._num_ends:
            return self._vocabulary.eos_mask
        if self._mask is None:
            self._mask = self._vocabulary.mask_of_matcher(self._matcher)
        return self._mask

    def allows(self, token_id: int) -> bool:
        return _has_bit(self.bitmask(), token_id)

    def advance(self, token_id: int) -> None:
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
        tokens: list[int] = []
        while len(tokens) < limit and (only := _only_bit(self.bitmask())) is not None:
            if only in self._vocabulary.eos_ids:
                break
            self.advance(only)
            tokens.append(only)
        self.rollback(len(tokens))
        return tokens

    def _describe(self, token_id: int) -> str:
        is_known = 0 <= token_id < len(self._vocabulary.tokens)
        return repr(self._vocabulary.tokens[token_id].decode(errors="replace")) if is_known else "unknown"


class _TriggeredConstraint:
    """Free text until a call begins; from there on the call's grammar."""

    def __init__(self, trigger: _CallTrigger) -> None:
        self._trigger = trigger
        self._vocabulary = trigger.vocabulary
        self._text = bytearray()
        self._lengths: list[int] = []  # of the text before each free token
        self._num_ends = 0
        self._held: _GrammarConstraint | None = None

    @property
    def finished(self) -> bool:
        return self._held.finished if self._held else self._num_ends > 0

    def bitmask(self) -> Bitmask | None:
        if self._held:
            return self._held.bitmask()
        if self._num_ends:
            return self._vocabulary.eos_mask
        vetoed = self._trigger.find_vetoed(bytes(self._text))
        return self._vocabulary.every_mask & ~self._vocabulary.mask_of_ids(vetoed) if vetoed else None

    def allows(self, token_id: int) -> bool:
        mask = self.bitmask()
        return 0 <= token_id < self._vocabulary.vocab_size if mask is None else _has_bit(mask, token_id)

    def advance(self, token_id: int) -> None:
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
        return self._held.forced(limit) if self._held else []


class _CallTrigger:
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

    def start(self, text: bytes, *, since: int) -> _GrammarConstraint | None:
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
        return _GrammarConstraint(self.vocabulary, matcher)

    def find_vetoed(self, text: bytes) -> list[int]:
        """The tokens that would begin a call after this text and go on as no call can."""
        answer = self._answer_start(text)
        if answer < 0:  # only a token that also ends the thinking can begin a call
            return [i for i in {*self._vetoed_whole_tags, *self._whole_names} if self._is_broken_by(text, i)]
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
            return [token_id for token_id in self._whole_names if self._is_broken_by(text, token_id)]
        typed = head.typed.encode("latin-1")
        endings = [name[len(typed) :] + b'"' for name in self._names if name.startswith(typed)]
        candidates = [token_id for ending in endings for token_id in self.vocabulary.starting_with(ending)]
        return self._refused(self._grammars.bare(head), text[answer + head.start :], candidates)

    def _refused(self, grammar: str, prefix: bytes, candidates: Sequence[int]) -> list[int]:
        """The candidates that the grammar does not accept after the prefix, be they its canonical tokens or not."""
        matcher = self._prime(grammar, prefix) if candidates else None
        return [token_id for token_id in candidates if matcher is None or not matcher.validate_tokens([token_id])]

    def _is_broken_by(self, text: bytes, token_id: int) -> bool:
        try:
            self.start(text + self.vocabulary.tokens[token_id], since=len(text))
        except GrammarError:
            return True
        return False

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
        return [token_id for token_id in whole if self._is_broken_by(b"", token_id)]

    @cached_property
    def _whole_names(self) -> list[int]:
        return sorted({token_id for name in self._names for token_id in self.vocabulary.containing(name + b'"')})


def _has_bit(mask: Bitmask, token_id: int) -> bool:
    return 0 <= token_id < 32 * len(mask) and bool((int(mask[token_id // 32]) >> (token_id % 32)) & 1)


def _only_bit(mask: Bitmask) -> int | None:
    """The only token of a mask, or None if there are more or none."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else int(words[0]) * 32 + word.bit_length() - 1


def _raise_unsupported(reason: str, schemas: Mapping[str, Mapping[str, Any]]) -> NoReturn:
    """Name the part of a schema that a grammar cannot hold."""
    reason = reason.strip().splitlines()[0] if reason.strip() else "unknown reason"
    for name, schema in schemas.items():
        path = _find_unsupported(schema, schema)
        if path is not None:
            where = ".".join(part for part in (name, *path[:-1]) if part) or "the schema's root"
            raise UnsupportedSchemaError(f"unsupported at {where}: {path[-1]}; simplify that part of the schema")
    raise GrammarError(f"the grammar cannot be compiled: {reason}")


def _find_unsupported(schema: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Path of the innermost part that fails for the same reason as the whole, and the reason; None if none fails."""
    from llguidance import LLMatcher

    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    reason = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema_text({**definitions, **schema})))
    if not reason or reason.startswith("WARNING"):
        return None
    for path, inner in subschemas(schema):
        found = _find_unsupported(inner, root)
        if found is not None and found[-1] == reason:
            return path, *found
    return (reason,)
