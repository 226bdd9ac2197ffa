"""A grammar holds a call to its schema, not to a white space that the model did not begin with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlite_agent.constraints import GrammarFactory
from dlite_agent.errors import GrammarError
from dlite_agent.testing import byte_tokenizer

CALL = {"name": "calculate", "arguments": {"expression": "2 * 3"}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "pattern": "^[0-9 *+]+$"}},
            "required": ["expression"],
        },
    },
}


def write(text: str) -> None:
    """Walk through a reply under `tool_choice="auto"`; raises GrammarError where it is not allowed."""
    tokenizer = byte_tokenizer()
    factory = GrammarFactory(tokenizer, vocab_size=len(tokenizer), eos_ids=[tokenizer.eos_token_id])
    constraint = factory.tool_call([TOOL])
    for token in tokenizer.encode(text):
        constraint.advance(token)
    assert constraint.allows(tokenizer.eos_token_id)


@pytest.mark.parametrize("indent", [1, 2, 4])
def test_a_call_spread_over_lines_may_stay_so(indent: int) -> None:
    write(json.dumps(CALL, indent=indent))
    write(f"```json\n{json.dumps(CALL, indent=indent)}\n```")


def test_a_compact_call_stays_compact() -> None:
    write(json.dumps(CALL))
    with pytest.raises(GrammarError):
        write(json.dumps(CALL).replace(": {", ":\n  {"))


@pytest.mark.parametrize("indent", [None, 2])
def test_its_arguments_are_held_in_any_style(indent: int | None) -> None:
    wrong = {"name": "calculate", "arguments": {"expression": "price * 3"}}
    with pytest.raises(GrammarError):
        write(json.dumps(wrong, indent=indent))
