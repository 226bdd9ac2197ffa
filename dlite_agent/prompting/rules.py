"""Pieces of grammars: Lark rules in llguidance's dialect, and what a schema's properties become.

Where calls are not JSON, a schema is taken apart here; a feature that cannot be held to is an error that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlite_agent.errors import UnsupportedSchemaError
from dlite_agent.prompting.schemas import DEFINITIONS, Schema, close_objects, references, with_uri_references
from dlite_agent.prompting.spans import TOOL_NAME

JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""The white space that chat templates write into JSON."""

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
    | {"$defs", "definitions", "$schema", "$id", "$comment"}
)
"""Keywords that say nothing about what is valid."""

_OBJECT = frozenset(("type", "properties", "required", "additionalProperties", "$ref"))
_MAX_NESTED = 12
_TEXT = frozenset(("type", "enum", "const", "minLength", "maxLength", "pattern"))


class Rules:
    """Collects the rules of one grammar."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[str, str] = {}

    def rule(self, body: str) -> str:
        """Add a rule; returns its name."""
        return self._add("part", body)

    def terminal(self, body: str) -> str:
        """Add a terminal, which is matched as one regular expression; returns its name."""
        return self._add("PART", body)

    def json(self, schema: Schema) -> str:
        """Add a rule for JSON of a schema, as chat templates write it; returns its name."""
        return self.rule(json_rule(schema))

    def text(self, schema: Schema, *, closer: str, after: str, where: str) -> str:
        """Add a terminal for the text of a string, unquoted and followed by `after`; returns its name.

        Raises:
            UnsupportedSchemaError: The schema restricts the string in another way than by its length, a list or a
                pattern from its beginning to its end.
        """
        refuse_others(schema, _TEXT, where)
        listed = listed_values(schema)
        if listed is not None:
            texts = [quoted(self._plain(text, closer, where)) for text in listed]
            return self.rule(f"({' | '.join(texts)}) {quoted(after)}")
        parts = [f"/{_whole_pattern(schema['pattern'], where)}/"] if "pattern" in schema else []
        if not parts or {"minLength", "maxLength"} & schema.keys():
            parts.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
        other = re.escape(closer).replace("/", "\\/")
        text = self.terminal(" & ".join([*parts, f"~/(?s:.*){other}(?s:.*)/"]))
        return self.terminal(f"{text} {quoted(after)}")

    @staticmethod
    def _plain(text: Any, closer: str, where: str) -> str:
        if not isinstance(text, str) or closer in text:
            raise UnsupportedSchemaError(f"unsupported at {where}: {text!r} cannot be written as plain text here")
        return text

    def _add(self, kind: str, body: str) -> str:
        key = f"{kind}:{body}"
        if key not in self._names:
            self._names[key] = f"{kind}_{len(self._names)}"
            self.lines.append(f"{self._names[key]}: {body}")
        return self._names[key]


@dataclass(frozen=True, slots=True)
class Property:
    """A property of an object: its key, its schema (definitions included) and whether it must be there."""

    key: str
    schema: Schema
    is_required: bool
    where: str


def properties_of(schema: Schema, where: str) -> list[Property]:
    """The properties of an object's schema in their order; the object is closed to others.

    Raises:
        UnsupportedSchemaError: The schema is not just a list of properties.
    """
    schema = resolve(schema, where)
    refuse_others(schema, _OBJECT, where)
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    if schema.get("type", "object") != "object" or any(key not in properties for key in required):
        raise UnsupportedSchemaError(f"unsupported at {where}: expected an object that lists what it requires")
    return [
        Property(
            key,
            with_definitions(inner, schema, f"{where}.properties.{key}"),
            key in required,
            f"{where}.properties.{key}",
        )
        for key, inner in properties.items()
    ]


def with_definitions(inner: Any, outer: Schema, where: str) -> Schema:
    """A part of a schema as a schema of its own, closed; references are resolved once.

    Raises:
        UnsupportedSchemaError: It refers to something else than a definition.
    """
    if not isinstance(inner, Mapping):
        inner = {} if inner is True else {"not": {}}
    if any(not ref.startswith(("#/$defs/", "#/definitions/")) for ref in references(inner)):
        raise UnsupportedSchemaError(f"unsupported at {where}: a $ref to something else than a definition in $defs")
    return resolve({**{key: outer[key] for key in DEFINITIONS if key in outer}, **inner}, where)


def resolve(schema: Schema, where: str) -> Schema:
    """The schema, or the definition that it refers to.

    Raises:
        UnsupportedSchemaError: There is no such definition, or it is just another reference to itself.
    """
    seen: set[str] = set()
    while isinstance(ref := schema.get("$ref"), str) and not schema.keys() - ANNOTATIONS - {"$ref"}:
        _, kind, name = [*ref.split("/", 2), "", ""][:3]
        target = schema.get(kind, {}).get(name) if kind in DEFINITIONS else None
        if ref in seen or not isinstance(target, Mapping):
            raise UnsupportedSchemaError(f"unsupported at {where}: the $ref {ref!r} leads to no definition")
        seen.add(ref)
        schema = {**{key: schema[key] for key in DEFINITIONS if key in schema}, **target}
    return schema


def is_text(schema: Schema) -> bool:
    """Whether a schema takes strings and nothing else."""
    listed = listed_values(schema)
    return bool(schema.get("type") == "string" if listed is None else all(isinstance(value, str) for value in listed))


def listed_values(schema: Schema) -> list[Any] | None:
    """The values of `enum` or `const`; None for other schemas."""
    listed: list[Any] | None = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return listed


def alternatives(schema: Schema, where: str) -> list[tuple[Schema, str]]:
    """The schemas one of which must fit, with their paths, for `anyOf` and lists of types; none for other schemas.

    Raises:
        UnsupportedSchemaError: It is nested in itself.
    """
    if where.count(".anyOf[") > _MAX_NESTED:
        raise UnsupportedSchemaError(f"unsupported at {where}: the schema is nested too deeply, or in itself")
    options: Any = schema.get("anyOf")
    if isinstance(options, list) and not schema.keys() - ANNOTATIONS - {"anyOf"}:
        paths = [f"{where}.anyOf[{index}]" for index in range(len(options))]
        return [(with_definitions(option, schema, path), path) for option, path in zip(options, paths, strict=True)]
    if isinstance(schema.get("type"), list) and not schema.keys() & {"enum", "const"}:
        return [({**schema, "type": kind}, where) for kind in schema["type"]]
    return []


def comma_separated(members: list[tuple[str, bool]], rules: Rules, comma: str) -> str:
    """Rule body of members in their order, given as (rule body, whether it must be there)."""
    first = later = quoted("")
    for body, is_required in reversed(members):
        taken_first, taken_later = f"{body} {later}", f"{quoted(comma)} {body} {later}"
        first = rules.rule(taken_first if is_required else f"{taken_first} | {first}")
        later = rules.rule(taken_later if is_required else f"{taken_later} | {later}")
    return first


def refuse_others(schema: Schema, known: frozenset[str], where: str) -> None:
    """Refuse keywords that are neither known nor mere annotations.

    Raises:
        UnsupportedSchemaError: There is one.
    """
    others = sorted(schema.keys() - known - ANNOTATIONS)
    if others:
        raise UnsupportedSchemaError(
            f"unsupported at {where}: {others[0]!r} cannot be held to where calls are not JSON; simplify that part"
        )


def plain_name(name: str, where: str) -> str:
    """A name that can stand without quotes.

    Raises:
        UnsupportedSchemaError: It cannot.
    """
    if not TOOL_NAME.fullmatch(name):
        raise UnsupportedSchemaError(f"unsupported at {where}: the name {name!r} cannot be written without quotes")
    return name


def json_rule(schema: Schema, style: Mapping[str, Any] = JSON_STYLE) -> str:
    """A rule body that matches JSON of the schema, in the style of chat templates or another."""
    return f"%json {schema_text(schema, style)}"


def schema_text(schema: Schema, style: Mapping[str, Any] = JSON_STYLE) -> str:
    """The schema for llguidance: objects closed, white space as the style says."""
    return json.dumps({**with_uri_references(close_objects(schema)), "x-guidance": dict(style)})


def in_json(text: str) -> str:
    """The text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted(text: str) -> str:
    """The text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def _whole_pattern(pattern: str, where: str) -> str:
    from llguidance import regex_to_lark  # only these need it

    inner = pattern.removeprefix("^").removesuffix("$")
    if len(inner) != len(pattern) - 2 or "|" in inner or inner.endswith("\\"):
        raise UnsupportedSchemaError(f"unsupported at {where}: 'pattern' {pattern!r} does not run from '^' to '$'")
    text: str = regex_to_lark(inner, "dw")
    return text
