"""How one call is written, apart from the markers around it: JSON objects, and a name with JSON arguments.

`pythonic`, `parameter_tags` and `escaped` are the other forms. A form knows where a call begins and ends in growing
text, reads and writes it, and gives the grammar that holds a model to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dlite_agent.errors import PromptError
from dlite_agent.prompting.rules import Rules, in_json, plain_name, quoted
from dlite_agent.prompting.schemas import Schema
from dlite_agent.prompting.spans import JSON_SPAN, NO, SPACE, TOOL_NAME, SpanStyle, scan_literal, scan_name, skip_space

Call = tuple[str, dict[str, Any]]


class CallForm(Protocol):
    """A way to write one call."""

    @property
    def span(self) -> SpanStyle:
        """Brackets and quotes of the part that `find_body` finds."""
        ...

    @property
    def after(self) -> str:
        """Text that ends a call, behind its span."""
        ...

    @property
    def is_listed(self) -> bool:
        """Whether calls may stand in `[`, `,` and `]`."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the form for which a tokenizer may have special tokens."""
        ...

    @property
    def malformed(self) -> str:
        """What to say of text that is no call of this form."""
        ...

    def find_body(self, text: str, position: int) -> int:
        """Where the span of the call at a position begins; `spans.NO` or `spans.OPEN` where none does (yet)."""
        ...

    def read(self, text: str, schemas: Mapping[str, Schema]) -> Call:
        """Name and arguments of a call that is complete; raises ValueError with what is wrong with it."""
        ...

    def guess(self, text: str) -> tuple[str | None, str]:
        """Name and arguments of a broken call, as text and as far as they can be told."""
        ...

    def write(self, name: str, args: Mapping[str, Any], schema: Schema) -> str:
        """The call as a model writes it; raises PromptError if the form has no way to write it."""
        ...

    def rule(self, name: str, schema: Schema, rules: Rules) -> str:
        """Body of a grammar rule for calls of a tool; raises UnsupportedSchemaError if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class JsonForm:
    """A JSON object with the tool's name and its arguments.

    Attributes:
        name_key: Key of the tool's name.
        arguments_key: Key of the arguments.
        other_arguments_key: Another key for them that is understood, but not written.
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    other_arguments_key: str | None = None
    span: SpanStyle = JSON_SPAN
    after: str = ""
    is_listed: bool = True
    markers: tuple[str, ...] = ()
    malformed: str = "the call is not one JSON object"

    def find_body(self, text: str, position: int) -> int:
        """Where the object begins."""
        reached = scan_literal(text, position, "{")
        return position if reached >= 0 else reached

    def read(self, text: str, schemas: Mapping[str, Schema]) -> Call:
        """Read the object; arguments may also be a JSON string of an object, or missing."""
        call = load_object(text)
        name = call.get(self.name_key)
        if not isinstance(name, str):
            raise ValueError(f"the call has no {self.name_key!r}")
        args = call.get(self.arguments_key, call.get(self.other_arguments_key or "", {}))
        if isinstance(args, str):
            args = load_object(args)
        if not isinstance(args, dict):
            raise ValueError(f"the {self.arguments_key!r} of the call are no JSON object")
        return name, args

    def is_exact(self, text: str) -> bool:
        """Whether an object has a name and arguments and nothing else."""
        keys = load_object(text).keys()
        return any(keys == {self.name_key, key} for key in (self.arguments_key, self.other_arguments_key) if key)

    def guess(self, text: str) -> tuple[str | None, str]:
        """Look for the two keys."""
        name = re.search(rf'"{re.escape(self.name_key)}"\s*:\s*"([^"\\]*)"', text)
        args = re.search(rf'"{re.escape(self.arguments_key)}"\s*:\s*', text)
        return (name.group(1) if name else None), (text[args.end() :] if args else text.strip(SPACE))

    def write(self, name: str, args: Mapping[str, Any], schema: Schema) -> str:
        """The object, with the white space of chat templates."""
        return json.dumps({self.name_key: name, self.arguments_key: dict(args)}, ensure_ascii=False)

    def rule(self, name: str, schema: Schema, rules: Rules) -> str:
        """The object of one tool."""
        head = f'{{"{self.name_key}": "{in_json(name)}", "{in_json(self.arguments_key)}": '
        return f"{quoted(head)} {rules.json(schema)} {quoted('}')}"


@dataclass(frozen=True, slots=True)
class NamedForm:
    """The tool's name, then its arguments as a JSON object, with markers before, between and after.

    Attributes:
        before: Text before the name.
        between: Text between name and arguments; white space at its ends is free.
        after: Text behind the arguments.
        id_mark: A marker that may stand behind the name with a call's id, which is dropped.
    """

    before: str
    between: str
    after: str
    id_mark: str = "[CALL_ID]"
    span: SpanStyle = JSON_SPAN
    is_listed: bool = False
    malformed: str = "the call is not a name with a JSON object"

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers of all parts."""
        found = re.findall(r"<[^<>]+>|\[[A-Z_]+\]", self.before + self.between + self.after + self.id_mark)
        return tuple(found)

    def find_body(self, text: str, position: int) -> int:
        """Where the arguments begin."""
        position = scan_literal(text, position, self.before)
        if position >= 0:
            position = scan_name(text, position)
        if position >= 0 and scan_literal(text, position, self.id_mark) >= 0:
            position = scan_name(text, position + len(self.id_mark))
        for literal in (self.between.strip(SPACE), "{"):
            if position < 0:
                return position
            start = skip_space(text, position)
            position = scan_literal(text, start, literal)
            if position == NO and self.id_mark.startswith(text[start:]):
                return scan_literal(text, start, self.id_mark)
        return position if position < 0 else position - 1

    def read(self, text: str, schemas: Mapping[str, Schema]) -> Call:
        """Read the name before the arguments, and these."""
        body = self.find_body(text, skip_space(text, 0))
        name = TOOL_NAME.match(text, skip_space(text, 0) + len(self.before))
        if body < 0 or name is None:
            raise ValueError(self.malformed)
        return name.group(), load_object(text[body:])

    def guess(self, text: str) -> tuple[str | None, str]:
        """Look for the markers."""
        start = text.find(self.before)
        name = TOOL_NAME.match(text, max(start, 0) + len(self.before)) if start >= 0 else None
        at = text.find(self.between.strip(SPACE))
        raw = text[at + len(self.between.strip(SPACE)) :] if at >= 0 else text
        return (name.group() if name and at >= 0 else None), raw.strip(SPACE)

    def write(self, name: str, args: Mapping[str, Any], schema: Schema) -> str:
        """The call with all its markers."""
        if not TOOL_NAME.fullmatch(name):
            raise PromptError(f"the tool name {name!r} cannot be written without quotes; rename the tool")
        return f"{self.before}{name}{self.between}{json.dumps(dict(args), ensure_ascii=False)}{self.after}"

    def rule(self, name: str, schema: Schema, rules: Rules) -> str:
        """The call of one tool."""
        head = f"{self.before}{plain_name(name, name)}{self.between}"
        return f"{quoted(head)} {rules.json(schema)} {quoted(self.after) if self.after else ''}"


def load_object(text: str) -> dict[str, Any]:
    """Read a JSON object; raises ValueError for anything else, also for numbers and characters that JSON lacks."""
    value = load_json(text)
    if not isinstance(value, dict):
        raise ValueError("the JSON is no object")
    return value


def load_json(text: str) -> Any:
    """Read a JSON value; raises ValueError for anything else, also for numbers and characters that JSON lacks."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse_constant)  # models put raw newlines in strings
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    return checked(value)


def checked(value: Any) -> Any:
    """The value, unless it holds what no store and no wire takes; raises ValueError then."""
    json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate would break every store and wire later on
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
