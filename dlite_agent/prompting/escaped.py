"""Calls as FunctionGemma writes them: `call:name{key:<escape>text<escape>,other:1}`.

Strings stand between two equal marks and have no escapes, so that a string with the mark in it cannot be written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlite_agent.errors import PromptError
from dlite_agent.prompting.forms import Call, checked
from dlite_agent.prompting.literals import LiteralStyle, read_arguments
from dlite_agent.prompting.rules import Rules, plain_name, quoted
from dlite_agent.prompting.schemas import Schema
from dlite_agent.prompting.spans import SPACE, TOOL_NAME, SpanStyle, scan_literal, scan_name
from dlite_agent.prompting.values import ValueRules

_BEFORE = "call:"


@dataclass(frozen=True, slots=True)
class EscapedForm:
    """A name with arguments in braces, without quotes around keys.

    Attributes:
        mark: What stands before and after each string.
    """

    mark: str = "<escape>"
    after: str = ""
    is_listed: bool = False
    comma: str = ","
    colon: str = ":"
    malformed: str = "the call is not call:name{key:value,...}"

    @property
    def span(self) -> SpanStyle:
        """Braces and brackets that nest, strings between marks."""
        return SpanStyle(("{", "["), ("}", "]"), {self.mark: self.mark}, has_escapes=False)

    @property
    def markers(self) -> tuple[str, ...]:
        """The mark alone."""
        return (self.mark,)

    def find_body(self, text: str, position: int) -> int:
        """Where the arguments begin."""
        position = scan_literal(text, position, _BEFORE)
        if position >= 0:
            position = scan_name(text, position)
        if position < 0:
            return position
        reached = scan_literal(text, position, "{")
        return position if reached >= 0 else reached

    def read(self, text: str, schemas: Mapping[str, Schema]) -> Call:
        """Read the arguments."""
        text = text.strip(SPACE)
        body = self.find_body(text, 0)
        if body < 0:
            raise ValueError(self.malformed)
        style = LiteralStyle((self.mark,), has_escapes=False, assign=":", outside="{}", has_bare_keys=True)
        return text[len(_BEFORE) : body], checked(read_arguments(text[body:], style))

    def guess(self, text: str) -> tuple[str | None, str]:
        """What stands before the brace, and what behind."""
        text = text.strip(SPACE)
        body = self.find_body(text, 0)
        return (text[len(_BEFORE) : body], text[body:]) if body >= 0 else (None, text)

    def write(self, name: str, args: Mapping[str, Any], schema: Schema) -> str:
        """The call, without any white space."""
        if not TOOL_NAME.fullmatch(name):
            raise PromptError(f"the tool name {name!r} cannot be written without quotes; rename the tool")
        return f"{_BEFORE}{name}{self.literal(dict(args))}"

    def rule(self, name: str, schema: Schema, rules: Rules) -> str:
        """Arguments in the schema's order."""
        return f"{quoted(_BEFORE + plain_name(name, name))} {ValueRules(rules, self).object(schema, name)}"

    def literal(self, value: Any) -> str:
        """A value with marks around its strings; raises PromptError if a string has the mark in it."""
        if isinstance(value, str):
            if self.mark in value:
                raise PromptError(f"a string with {self.mark} in it cannot be written in this dialect; choose another")
            return f"{self.mark}{value}{self.mark}"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{self.key(key)}:{self.literal(inner)}" for key, inner in value.items()) + "}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(self.literal, value)) + "]"
        return json.dumps(value)

    def key(self, key: str) -> str:
        """A key, with marks around it only where it needs them."""
        return key if TOOL_NAME.fullmatch(key) and ":" not in key else self.literal(key)

    def string(self, schema: Schema, where: str, rules: Rules) -> str:
        """A string between its marks."""
        return f"{quoted(self.mark)} {rules.text(schema, closer=self.mark, after=self.mark, where=where)}"
