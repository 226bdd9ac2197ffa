"""Grammars of tool calls and JSON, as Lark text in llguidance's dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dlite_agent.prompting.dialects import Dialect
from dlite_agent.prompting.heads import Head
from dlite_agent.prompting.schemas import close_objects

_JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""The white space that chat templates write into JSON."""

_SPREAD_STYLE = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": True}
"""Any white space: a model that spreads an object over lines would be driven into nonsense by another style."""

_SPACES = "[ \\t\\r\\n]*"


class CallGrammars:
    """The grammars of calls of some tools. Each ends where a reply with calls ends.

    Args:
        schemas: Name of each tool, and the JSON schema of its arguments.
        dialect: How calls are written.
        parallel: Allow several calls.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], dialect: Dialect, *, parallel: bool) -> None:
        self.dialect = dialect
        self.names = tuple(name for name in schemas if json.dumps(name, ensure_ascii=False) == f'"{name}"')
        self._is_parallel = parallel
        self._schemas = schemas
        self._object = _quoted(f'{{"{dialect.name_key}": "') + " named"
        self._call = f"{_quoted(dialect.call_open)} NL {self._object} NL {_quoted(dialect.call_close)}"

    def forced(self) -> str:
        """The reply is calls and nothing else."""
        return self._grammar(f"{self._call} {self._more(f'NL {self._call}')}")

    def tagged(self) -> str:
        """From the tag on that began the first call; the white space after it may be the model's own."""
        opened, closed = _quoted(self.dialect.call_open), _quoted(self.dialect.call_close)
        return self._grammar(f'{opened} (NL | " ")? {self._object} NL? {closed} {self._more(f"NL {self._call}")} NL?')

    def bare(self, head: Head) -> str:
        """From the brace on that began the first call, after the given head."""
        closer = "" if head.fence is None else _quoted(self.dialect.fences[head.fence][1])
        if head.is_list:
            rest = f"""{self._more(f'", " {self._object}')} "]" """
        else:
            rest = self._more(f"(NL | SEMICOLON) {self._object}")
        start = f"HEAD named {rest} {f'NL? {closer}' if closer else ''} NL?"
        grammar = self._grammar(start, is_spread=head.is_spread)
        key = re.escape(self.dialect.name_key).replace("/", "\\/")
        return f'{grammar}\nHEAD: /\\{{{_SPACES}"{key}"{_SPACES}:{_SPACES}"/\nSEMICOLON: /;[ \\n]?/'

    def _more(self, rule: str) -> str:
        return f"({rule})*" if self._is_parallel else ""

    def _grammar(self, start: str, *, is_spread: bool = False) -> str:
        style = _SPREAD_STYLE if is_spread else _JSON_STYLE
        args = [f"args_{i}: {json_rule(schema, style)}" for i, schema in enumerate(self._schemas.values())]
        named = " | ".join(self._named(name, i, is_spread=is_spread) for i, name in enumerate(self._schemas))
        return "\n".join([f"start: {start}", 'NL: "\\n"', f"SPACE: /{_SPACES}/", f"named: {named}", *args])

    def _named(self, name: str, index: int, *, is_spread: bool) -> str:
        """The object from the tool's name on."""
        key = _in_json(self.dialect.arguments_key)
        if not is_spread:
            return f"""{_quoted(f'{_in_json(name)}", "{key}": ')} args_{index} {_quoted("}")}"""
        literals = [f'{_in_json(name)}"', ",", f'"{key}"', ":"]
        return f"{' SPACE '.join(map(_quoted, literals))} SPACE args_{index} SPACE {_quoted('}')}"


def json_rule(schema: Mapping[str, Any], style: Mapping[str, Any] = _JSON_STYLE) -> str:
    """A rule body that matches JSON of the schema, in the style of chat templates or another."""
    return f"%json {schema_text(schema, style)}"


def schema_text(schema: Mapping[str, Any], style: Mapping[str, Any] = _JSON_STYLE) -> str:
    """The schema for llguidance: objects closed, white space as the style says."""
    return json.dumps({**close_objects(schema), "x-guidance": dict(style)})


def _in_json(text: str) -> str:
    """The text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _quoted(text: str) -> str:
    """The text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)
