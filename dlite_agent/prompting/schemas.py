"""JSON schemas of tool arguments and structured answers: where their parts are, and what a grammar makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from dlite_agent.errors import GrammarError

Schema = Mapping[str, Any]

DEFINITIONS = ("$defs", "definitions")
_MAPS = (*DEFINITIONS, "properties", "patternProperties")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLES = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_COMPOSING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "if", "not", "unevaluatedProperties")
_URI_MARKS = "!#$%&'()*+,/:;=?@~"


def tool_parameters(tools: Sequence[Mapping[str, Any]]) -> dict[str, Schema]:
    """Name and arguments schema of OpenAI-style tools; a tool without parameters takes an empty object.

    Raises:
        GrammarError: A tool has no name, or two have the same.
    """
    parameters: dict[str, Schema] = {}
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name")
        if not isinstance(name, str) or not name or name in parameters:
            raise GrammarError(f"a tool is named {name!r}; expected a name that no other tool has")
        schema = function.get("parameters") or {"properties": {}}
        parameters[name] = schema if "type" in schema else {"type": "object", **schema}
    return parameters


def subschemas(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas directly inside a schema, each with its path from there."""
    for key in _MAPS:
        for name, inner in _mapping(schema.get(key)).items():
            if isinstance(inner, Mapping):
                yield f"{key}.{name}", inner
    for key in _LISTS:
        inners = schema.get(key)
        for index, inner in enumerate(inners if isinstance(inners, list) else []):
            if isinstance(inner, Mapping):
                yield f"{key}[{index}]", inner
    for key in _SINGLES:
        if isinstance(schema.get(key), Mapping):
            yield key, schema[key]


def references(schema: Any) -> list[str]:
    """What the parts of a schema refer to; its definitions are left out."""
    if isinstance(schema, Mapping):
        own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
        return own + [ref for key, inner in schema.items() if key not in DEFINITIONS for ref in references(inner)]
    if isinstance(schema, list):
        return [ref for inner in schema for ref in references(inner)]
    return []


def close_objects(schema: Schema) -> Schema:
    """The schema with `additionalProperties: false` wherever it lists properties and says nothing about others.

    JSON Schema allows any property that it does not forbid; a model that is held to a schema should not invent them.
    What satisfies the closed schema satisfies the given one. Schemas that are composed with `allOf` stay as they are:
    closing the parts would leave nothing that satisfies them together.
    """
    return schema if _uses_all_of(schema) else _closed(schema)


def with_uri_references(schema: Schema) -> dict[str, Any]:
    """The schema with what a URI cannot hold percent-encoded in each `$ref`: a definition may have any name."""
    encoded = _with_parts(schema, with_uri_references, _SINGLES)
    if isinstance(schema.get("$ref"), str):
        encoded["$ref"] = quote(re.sub("%(?![0-9A-Fa-f]{2})", "%25", schema["$ref"]), safe=_URI_MARKS)
    return encoded


def _closed(schema: Schema) -> dict[str, Any]:
    closed = _with_parts(schema, _closed, ("items", "additionalProperties"))
    if "properties" in schema and "additionalProperties" not in schema and not any(k in schema for k in _COMPOSING):
        declared = _mapping(schema["properties"])
        if all(name in declared for name in schema.get("required", ())):
            closed["additionalProperties"] = False
    return closed


def _with_parts(schema: Schema, change: Callable[[Schema], Schema], singles: Sequence[str]) -> dict[str, Any]:
    """The schema with its parts changed; of the keys that hold a single one, those that are named."""
    changed = dict(schema)
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            changed[key] = {name: _changed(inner, change) for name, inner in schema[key].items()}
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            changed[key] = [_changed(inner, change) for inner in schema[key]]
    for key in singles:
        if key in schema:
            changed[key] = _changed(schema[key], change)
    return changed


def _changed(part: Any, change: Callable[[Schema], Schema]) -> Any:
    return change(part) if isinstance(part, Mapping) else part


def _uses_all_of(schema: Schema) -> bool:
    parts = schema.get("allOf")
    if isinstance(parts, list) and (len(parts) > 1 or "properties" in schema):
        return True
    return any(_uses_all_of(inner) for _, inner in subschemas(schema))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def is_valid(value: Any, schema: Schema | None) -> bool:
    """Whether a value fits a schema. A broken one, or one that refers elsewhere or just to itself, fits nothing."""
    from jsonschema import Draft202012Validator, SchemaError  # takes a while to import, and not every reply needs it
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    if schema is None:
        return False
    try:
        Draft202012Validator.check_schema(schema)
        return bool(Draft202012Validator(schema, registry=Registry()).is_valid(value))
    except (SchemaError, Unresolvable, RecursionError, re.error):
        return False
