"""Grammars of nested values where JSON's own grammar will not do: its strings could hold the text that ends a value.

Each rule writes arrays and objects out and leaves the strings to a style. A schema that cannot be taken apart so is
refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from dlite_agent.errors import UnsupportedSchemaError
from dlite_agent.prompting.rules import (
    Rules,
    alternatives,
    comma_separated,
    is_text,
    listed_values,
    properties_of,
    quoted,
    refuse_others,
    with_definitions,
)
from dlite_agent.prompting.schemas import Schema

_MAX_DEPTH = 12
_SCALARS = ("integer", "number", "boolean", "null")
_ESCAPED = r'\\(?:["\\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))'


class ValueStyle(Protocol):
    """How values are written."""

    @property
    def comma(self) -> str:
        """What stands between items."""
        ...

    @property
    def colon(self) -> str:
        """What stands between a key and its value."""
        ...

    def literal(self, value: Any) -> str:
        """A value as it is written."""
        ...

    def key(self, key: str) -> str:
        """A key as it is written."""
        ...

    def string(self, schema: Schema, where: str, rules: Rules) -> str:
        """Rule body of a string."""
        ...


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """JSON without a certain text in its strings.

    Attributes:
        closer: The text that would end the value.
    """

    closer: str
    comma: str = ", "
    colon: str = ": "

    def literal(self, value: Any) -> str:
        """JSON with a backslash in what looks like a closing tag."""
        return json.dumps(value, ensure_ascii=False).replace("</", "<\\/")

    def key(self, key: str) -> str:
        """A key in quotes."""
        return self.literal(key)

    def string(self, schema: Schema, where: str, rules: Rules) -> str:
        """A quoted string, with a limit to its length if the schema has one."""
        refuse_others(schema, frozenset(("type", "enum", "const", "minLength", "maxLength")), where)
        listed = listed_values(schema)
        if listed is not None:
            return rules.rule(" | ".join(quoted(self.literal(value)) for value in listed))
        size = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
        closer = self.closer.replace("/", "\\/")
        return rules.terminal(f'/"(?:[^"\\\\\\x00-\\x1f]|{_ESCAPED}){size}"/ & ~/(?s:.*){closer}(?s:.*)/')


class ValueRules:
    """Adds the rules of values to a grammar.

    Args:
        rules: The grammar's rules.
        style: How values are written.
    """

    def __init__(self, rules: Rules, style: ValueStyle) -> None:
        self._rules = rules
        self._style = style

    def value(self, schema: Schema, where: str, depth: int = 0) -> str:
        """Rule body of a value.

        Raises:
            UnsupportedSchemaError: The schema has a feature that is not taken apart here.
        """
        options = alternatives(schema, where)
        if options:
            return self._rules.rule(" | ".join(self.value(option, path, depth) for option, path in options))
        if is_text(schema):
            return self._style.string(schema, where, self._rules)
        listed = listed_values(schema)
        if listed is not None:
            refuse_others(schema, frozenset(("type", "enum", "const")), where)
            return self._rules.rule(" | ".join(quoted(self._style.literal(value)) for value in listed))
        kind = schema.get("type")
        if kind in _SCALARS:
            return self._rules.json(schema)
        if depth > _MAX_DEPTH:
            raise UnsupportedSchemaError(f"unsupported at {where}: the schema is nested too deeply, or in itself")
        if kind == "array":
            return self._array(schema, where, depth)
        if "properties" in schema or schema.get("additionalProperties") is False:
            return self.object(schema, where, depth)
        refuse_others(schema, frozenset(("type", "additionalProperties") if kind in ("object", None) else ()), where)
        if schema.get("additionalProperties", True) is not True:
            raise UnsupportedSchemaError(f"unsupported at {where}: 'additionalProperties' with a schema")
        return self._anything("object" if kind == "object" else "value")

    def object(self, schema: Schema, where: str, depth: int = 0) -> str:
        """Rule body of an object with the schema's properties in their order; raises as `value` does."""
        style = self._style
        members = [
            (f"{quoted(style.key(p.key) + style.colon)} {self.value(p.schema, p.where, depth + 1)}", p.is_required)
            for p in properties_of(schema, where)
        ]
        return self._rules.rule(f"{quoted('{')} {comma_separated(members, self._rules, style.comma)} {quoted('}')}")

    def _array(self, schema: Schema, where: str, depth: int) -> str:
        refuse_others(schema, frozenset(("type", "items", "minItems", "maxItems")), where)
        path = f"{where}.items"
        item = self.value(with_definitions(schema.get("items", {}), schema, path), path, depth + 1)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return self._rules.rule(quoted("[]"))
        counted = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        more = "" if most == 1 else f"({quoted(self._style.comma)} {item}){counted}"  # no range may end with 0
        return self._rules.rule(f'"[" {f"{item} {more}" if least else f"({item} {more})?"} "]"')

    def _anything(self, kind: str) -> str:
        """Any object or any value."""
        string = self._style.string({"type": "string"}, "", self._rules)
        scalar = self._rules.json({"type": list(_SCALARS)})
        comma, colon = quoted(self._style.comma), quoted(self._style.colon)
        for line in (
            f'any_object: "{{" (any_member ({comma} any_member)*)? "}}"',
            f"any_member: {string} {colon} any_value",
            f'any_value: {string} | {scalar} | any_object | "[" (any_value ({comma} any_value)*)? "]"',
        ):
            if line not in self._rules.lines:
                self._rules.lines.append(line)
        return f"any_{kind}"
