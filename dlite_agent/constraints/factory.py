"""Grammars over tokens: what may follow, what must follow, and where a grammar starts by itself.

A constraint walks along the reply token by token, runs ahead along a draft and is rolled back. Grammars are written
for llguidance and work on bytes, so that every tokenization of a text is treated alike; only where the text is forced
is its canonical tokenization the one that is allowed.

Under `tool_choice="auto"` a reply is free text until a call begins: with the dialect's tag, or at the very beginning
with a bare (or fenced, or listed) object that names a bound tool. From there on a grammar holds it. Both can happen in
the middle of a token: tokens that would begin a call and go on wrongly are masked out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from threading import Lock
from typing import Any, NoReturn

from dlite_agent.constraints.call_triggers import CallTrigger, NoCall
from dlite_agent.constraints.held_text import GrammarConstraint, TriggeredConstraint
from dlite_agent.constraints.vocabulary import Vocabulary
from dlite_agent.engine.constraint import TokenConstraint
from dlite_agent.errors import GrammarError
from dlite_agent.prompting.dialects import HERMES, Dialect
from dlite_agent.prompting.grammars import CallGrammars
from dlite_agent.prompting.rules import json_rule, schema_text
from dlite_agent.prompting.schema_limits import refuse_unheld, unsupported
from dlite_agent.prompting.schemas import DEFINITIONS, subschemas, tool_parameters

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
        refuse_unheld(schemas)
        grammars = CallGrammars(schemas, dialect, parallel=parallel)
        forced = self._compile(grammars.forced(is_thinking=is_thinking), schemas)
        if choice == "auto":
            trigger = CallTrigger(self._vocabulary, grammars, self._compile, is_thinking=is_thinking)
            return TriggeredConstraint(trigger)
        return GrammarConstraint(self._vocabulary, forced)

    def no_call(self, *, dialect: Dialect = HERMES, is_thinking: bool = False) -> TokenConstraint:
        """Leave all free but what would begin a call behind the thinking.

        Args:
            dialect: How calls are written.
            is_thinking: The prompt has opened the model's thinking.
        """
        return TriggeredConstraint(NoCall(self._vocabulary, dialect, is_thinking=is_thinking))

    def json_schema(self, schema: Mapping[str, Any]) -> TokenConstraint:
        """Hold the reply to JSON of a schema, closed as a tool's.

        Raises:
            UnsupportedSchemaError: The schema has a feature that a grammar cannot hold; the message has its path.
        """
        refuse_unheld({"": schema})
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
        return GrammarConstraint(self._vocabulary, self._compile(grammar, schemas))

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


def _raise_unsupported(reason: str, schemas: Mapping[str, Mapping[str, Any]]) -> NoReturn:
    """Name the part of a schema that a grammar cannot hold."""
    reason = reason.strip().splitlines()[0] if reason.strip() else "unknown reason"
    for name, schema in schemas.items():
        path = _find_unsupported(schema, schema)
        if path is not None:
            raise unsupported((name, *path[:-1]), path[-1])
    raise GrammarError(f"the grammar cannot be compiled: {reason}")


def _find_unsupported(schema: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Path of the innermost part that fails for the same reason as the whole, and the reason; None if none fails."""
    from llguidance import LLMatcher

    definitions = {key: root[key] for key in DEFINITIONS if key in root}
    reason = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema_text({**definitions, **schema})))
    if not reason or reason.startswith("WARNING"):
        return None
    for path, inner in subschemas(schema):
        found = _find_unsupported(inner, root)
        if found is not None and found[-1] == reason:
            return path, *found
    return (reason,)
