"""Grammars of tool calls, as Lark text in llguidance's dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from dlite_agent.prompting.dialects import Dialect
from dlite_agent.prompting.heads import Head
from dlite_agent.prompting.rules import JSON_STYLE, Rules, in_json, json_rule, quoted
from dlite_agent.prompting.schemas import Schema
from dlite_agent.prompting.spans import SPACE

_SPREAD_STYLE = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": True}
"""Any white space: a model that spreads an object over lines would be driven into nonsense by another style."""

_SPACES = "[ \\t\\r\\n]*"
_MAY_BREAK = '(NL | " ")?'


class CallGrammars:
    """The grammars of calls of some tools. Each ends where a reply with calls ends.

    Args:
        schemas: Name of each tool, and the JSON schema of its arguments.
        dialect: How calls are written.
        parallel: Allow several calls.

    Raises:
        UnsupportedSchemaError: The dialect has no grammar for a tool; the message has the path.
    """

    def __init__(self, schemas: Mapping[str, Schema], dialect: Dialect, *, parallel: bool) -> None:
        self.dialect = dialect
        self.names = tuple(name for name in schemas if json.dumps(name, ensure_ascii=False) == f'"{name}"')
        self._is_parallel = parallel
        self._schemas = schemas
        rules = Rules()
        calls = [
            f"call_{i}: {dialect.form.rule(name, schema, rules)}" for i, (name, schema) in enumerate(schemas.items())
        ]
        any_call = " | ".join(f"call_{i}" for i in range(len(calls)))
        self._rules = "\n".join(['NL: "\\n"', f"call: {any_call}", *calls, *rules.lines])

    def forced(self, *, is_thinking: bool = False) -> str:
        """The reply is calls and nothing else; thinking that the prompt has opened is closed at once."""
        closing = quoted(f"\n{self.dialect.thinking[1]}\n\n") if is_thinking else ""
        begin, end = _literal(self.dialect.begin), _literal(self.dialect.end)
        return f"start: {closing} {begin} call {self._more()} {end}\n{self._rules}"

    def tagged(self) -> str:
        """From the tag on that began the first call; the white space after it may be the model's own."""
        opened = self.dialect.call_open
        begin = _literal(self.dialect.begin.removeprefix(opened).strip(SPACE))
        may_break = "NL?" if self.dialect.end[:1].isspace() else ""
        end = f"{may_break} {_literal(self.dialect.end.strip(SPACE))}"
        start = f"{quoted(opened)} {_MAY_BREAK} {begin} call {self._more()} {end} NL?"
        return f"start: {start}\n{self._rules}"

    def bare(self, head: Head) -> str:
        """From the brace on that began the first call as bare JSON, after the given head."""
        key = self.dialect.bare_form.name_key
        closer = "" if head.fence is None else quoted(self.dialect.fences[head.fence][1])
        whole = quoted(f'{{"{key}": "') + " named"
        if head.is_list:
            rest = f"""{self._repeated(f'", " {whole}')} "]" """
        else:
            rest = self._repeated(f"(NL | SEMICOLON) {whole}")
        name_key = re.escape(key).replace("/", "\\/")
        style = _SPREAD_STYLE if head.is_spread else JSON_STYLE
        args = [f"args_{i}: {json_rule(schema, style)}" for i, schema in enumerate(self._schemas.values())]
        named = " | ".join(self._named(name, i, is_spread=head.is_spread) for i, name in enumerate(self._schemas))
        return "\n".join(
            [
                f"start: HEAD named {rest} {f'NL? {closer}' if closer else ''} NL?",
                f'HEAD: /\\{{{_SPACES}"{name_key}"{_SPACES}:{_SPACES}"/',
                'NL: "\\n"',
                f"SPACE: /{_SPACES}/",
                "SEMICOLON: /;[ \\n]?/",
                f"named: {named}",
                *args,
            ]
        )

    def _more(self) -> str:
        """Further calls.

        Where nothing stands between two, a line break may: what two markers begin with in common would else be forced,
        as text in pieces, and the markers' own tokens would never be allowed.
        """
        between = _literal(self.dialect.between) or "NL?"
        return f"{self._repeated(f'{between} call')} {'' if self.dialect.between else 'NL?'}"

    def _repeated(self, rule: str) -> str:
        return f"({rule})*" if self._is_parallel else ""

    def _named(self, name: str, index: int, *, is_spread: bool) -> str:
        """The object from the tool's name on."""
        key = in_json(self.dialect.bare_form.arguments_key)
        if not is_spread:
            return f"""{quoted(f'{in_json(name)}", "{key}": ')} args_{index} {quoted("}")}"""
        literals = [f'{in_json(name)}"', ",", f'"{key}"', ":"]
        return f"{' SPACE '.join(map(quoted, literals))} SPACE args_{index} SPACE {quoted('}')}"


def _literal(text: str) -> str:
    """The text as Lark literals, nothing for nothing.

    It is cut at line breaks and markers, so that no two literals begin alike: the lexer takes the longest that may go
    on, and so would not see the end of a block where another call may follow.
    """
    return " ".join("NL" if part == "\n" else quoted(part) for part in re.split(r"(\n|<[^<>]*>)", text) if part)
