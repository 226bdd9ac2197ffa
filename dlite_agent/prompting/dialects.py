"""How a model family writes tool calls: one row of a table per dialect, found from the chat template.

A new family is a new row in `DIALECTS`. Templates that no row knows get `GENERIC`: the Hermes protocol, explained to
the model in the system message (see `prompting.template`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Dialect:
    """The written form of a tool call: `call_open` JSON-object `call_close`.

    Attributes:
        name: What the dialect is called.
        call_open: Text that starts a call.
        call_close: Text that ends it.
        name_key: Key of the tool's name in the JSON object.
        arguments_key: Key of the arguments.
        fences: Wrappers that small models put around a bare JSON call instead of the tags; an opener that starts with
            another one comes first.
        marks: Texts that a chat template of this dialect contains, all of them; empty for a dialect that no template
            teaches.
        foreign_marks: Texts that say it is another dialect after all.
    """

    name: str
    call_open: str = "<tool_call>"
    call_close: str = "</tool_call>"
    name_key: str = "name"
    arguments_key: str = "arguments"
    fences: tuple[tuple[str, str], ...] = (("```json", "```"), ("```", "```"), ("<tools>", "</tools>"))
    marks: tuple[str, ...] = ()
    foreign_marks: tuple[str, ...] = ()

    @property
    def is_native(self) -> bool:
        """Whether chat templates of this dialect explain the protocol to the model themselves."""
        return bool(self.marks)

    def format_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """One call as the model would write it."""
        call = {self.name_key: name, self.arguments_key: dict(arguments)}
        return f"{self.call_open}\n{json.dumps(call, ensure_ascii=False)}\n{self.call_close}"

    def format_result(self, text: str) -> str:
        """One tool result as part of a user message, for templates that know no tool role."""
        return f"<tool_response>\n{text}\n</tool_response>"

    def format_tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The tool list and the protocol, as text for the system message."""
        signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        call = f'{{"{self.name_key}": <function-name>, "{self.arguments_key}": <args-json-object>}}'
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{signatures}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            f"{self.call_open}{self.call_close} XML tags:\n{self.call_open}\n{call}\n{self.call_close}"
        )


HERMES = Dialect(name="hermes", marks=("<tool_call>", "</tool_call>", "arguments"), foreign_marks=("<function=",))
GENERIC = Dialect(name="generic")

DIALECTS: tuple[Dialect, ...] = (HERMES,)


def detect_dialect(template: str) -> Dialect:
    """The dialect that a chat template teaches, or `GENERIC` where no row of the table knows it."""
    for dialect in DIALECTS:
        if all(mark in template for mark in dialect.marks) and not any(m in template for m in dialect.foreign_marks):
            return dialect
    return GENERIC
