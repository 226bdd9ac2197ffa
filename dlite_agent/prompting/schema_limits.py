"""What no grammar can hold of a JSON schema and llguidance does not see: values without an end, numbers, depth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dlite_agent.errors import UnsupportedSchemaError
from dlite_agent.prompting.schemas import Schema, subschemas

_MAX_DEPTH = 64
_MAX_INTEGER = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def refuse_unheld(schemas: Mapping[str, Schema]) -> None:
    """Refuse schemas that would be held wrongly, or only until a reply is on its way.

    Args:
        schemas: By the names of their tools; of an answer's, the name is empty.

    Raises:
        UnsupportedSchemaError: A schema is nested too deeply, bounds integers beyond 2^53, which are not told apart
            there, or has only values without an end; the message has the path.
    """
    for name, schema in schemas.items():
        parts = list(_parts(schema, (name,) if name else ()))
        ending = _Ending(schema)
        for place, part in parts:
            if not ending.is_possible(part, frozenset()):
                raise unsupported(place, "every value of it would contain another one of its kind")


def _parts(schema: Schema, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Yield a schema and all that is in it, each with its path."""
    if len(path) > _MAX_DEPTH:
        raise unsupported(path[:4], f"it is nested more than {_MAX_DEPTH} deep")
    for key in _BOUNDS:
        bound = schema.get(key)
        if isinstance(bound, int) and abs(bound) > _MAX_INTEGER:
            raise unsupported(path, f"{key} is {bound}, beyond 2^53")
    yield path, schema
    for step, inner in subschemas(schema):
        yield from _parts(inner, (*path, step))


def unsupported(path: Iterable[str], reason: str) -> UnsupportedSchemaError:
    """Return the error for the part of a schema at a path; names that are empty are left out."""
    where = ".".join(filter(None, path)) or "the schema's root"
    return UnsupportedSchemaError(f"unsupported at {where}: {reason}; simplify that part of the schema")


class _Ending:
    """Finds out whether parts of a schema have values that end."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._ends: set[str] = set()  # references known to

    def is_possible(self, schema: Any, entered: frozenset[str]) -> bool:
        """Whether some value of `schema` needs no value of a definition that it is inside of, the `entered` ones."""
        if not isinstance(schema, Mapping):
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#") and reference not in self._ends:
            if reference in entered:
                return False
            if not self.is_possible(_resolve(reference, self._root), entered | {reference}):
                return False
            self._ends.add(reference)
        for key in ("anyOf", "oneOf"):
            choices = schema.get(key)
            if isinstance(choices, list) and choices and not any(self.is_possible(each, entered) for each in choices):
                return False
        return all(self.is_possible(part, entered) for part in _needed(schema))


def _needed(schema: Schema) -> list[Any]:
    """Return the parts of which every value of a schema has one."""
    needed = list(schema.get("allOf") or [])
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        needed += [properties[name] for name in schema.get("required") or [] if name in properties]
    if (schema.get("minItems") or 0) > len(schema.get("prefixItems") or []):
        needed.append(schema.get("items"))
    return needed


def _resolve(reference: str, root: Schema) -> Any:
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
