"""Tools keep their whole schema, and what cannot be held is refused by name before any token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, RootModel

from dlite_agent import ChatDLite, Settings
from dlite_agent.errors import ConfigError, UnsupportedSchemaError
from dlite_agent.runtime import close_all
from dlite_agent.testing import byte_tokenizer, write_tiny_chat_model
from dlite_agent.tool_schemas import format_tools


class Node(BaseModel):
    """A node."""

    value: int
    children: list[Node] = []


class Pair(BaseModel):
    """Two numbers."""

    first: int
    second: int


class Numbers(RootModel[list[int]]):
    """Some numbers."""


@tool
def plant(root: Node) -> str:
    """Plant a tree."""
    return str(root)


def climb(root: Node) -> str:
    """Climb a tree."""
    return str(root)


INTEGER = {"type": "integer", "minimum": 0, "maximum": 9}
OBJECT = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
ROOTS: dict[str, dict[str, Any]] = {
    "anyOf": {"anyOf": [OBJECT]},
    "allOf": {"type": "object", "allOf": [OBJECT]},
    "$ref": {"$ref": "#/$defs/p", "$defs": {"p": OBJECT}},
    "additionalProperties": {"type": "object", "additionalProperties": INTEGER, "minProperties": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatDLite]:
    folder = write_tiny_chat_model(tmp_path_factory.mktemp("model"))
    settings = Settings(home=tmp_path_factory.mktemp("home"), redis_url=None, threads=1, offline=True)
    ids = byte_tokenizer().convert_tokens_to_ids(list('"]}'))
    closing = dict.fromkeys(ids, 6.0)  # or random weights would write without an end
    yield ChatDLite(model=str(folder), settings=settings, max_tokens=400, temperature=1.0, logit_bias=closing)
    close_all()


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_schema_whose_root_lists_no_properties_is_held_in_every_method(
    model: ChatDLite, root: str, seed: int
) -> None:
    schema = {"title": "t", "description": "A thing.", **ROOTS[root]}
    for method in ("function_calling", "json_schema"):
        answer = model.with_structured_output(schema, method=method, seed=seed).invoke("go")
        Draft202012Validator(schema).validate(answer)


@pytest.mark.parametrize("given", [Node, plant, climb], ids=["class", "tool", "function"])
def test_a_definition_that_contains_itself_stays_in_the_tool(model: ChatDLite, given: Any) -> None:
    (formatted,) = format_tools([given])
    parameters = formatted["function"]["parameters"]
    assert "Node" in parameters["$defs"]
    assert "title" not in str(parameters)
    wrong: dict[str, Any] = {"value": 1, "children": [{"value": "two"}]}
    assert not Draft202012Validator(parameters).is_valid(wrong if given is Node else {"root": wrong})
    name = formatted["function"]["name"]
    for seed in range(4):
        (call,) = model.bind_tools([given], tool_choice=name).invoke("go", seed=seed, max_tokens=1500).tool_calls
        Draft202012Validator(parameters).validate(call["args"])


@pytest.mark.parametrize("given", [Pair, {"title": "t", "description": "d", **OBJECT}])
def test_other_tools_are_as_langchain_makes_them(given: Any) -> None:
    assert format_tools([given]) == [convert_to_openai_tool(given)]


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ([{"title": "any", "description": "d", **OBJECT}], "rename it"),
        ([{"name": "required", "description": "d", "parameters": OBJECT}], "rename it"),
        ([Numbers], "have type 'array'"),
        ([{"title": "\ud800", "description": "d", **OBJECT}], "is none"),
        ([{"name": "t", "description": "d", "parameters": {"default": {1, 2}}}], "is none"),
        ([{"name": "t", "description": "d", "parameters": {"default": float("nan")}}], "is none"),
    ],
)
def test_tools_that_cannot_be_are_refused_when_they_are_bound(model: ChatDLite, tools: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        model.bind_tools(tools)


@pytest.mark.parametrize("choice", ["auto", "none", "any", "Pair"])
def test_two_tools_of_one_name_are_refused_when_they_are_called(model: ChatDLite, choice: str) -> None:
    with pytest.raises(ConfigError, match="two tools are named 'Pair'"):
        model.bind_tools([Pair, Pair], tool_choice=choice).invoke("go")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = INTEGER
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#/$defs/x"}}, "required": ["next"]}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer", "minimum": 2**63 + 1}}}, r"properties\.a: minimum"),
        ({"type": "object", "properties": {"a": {"items": {"maximum": -(2**60)}}}}, r"properties\.a\.items: maximum"),
        (nested(400), "nested more than 64 deep"),
        ({**ENDLESS, "$defs": {"x": ENDLESS}}, "would contain another"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "would contain another"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "would contain another"),
        ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}, "would contain another"),
    ],
)
def test_what_no_grammar_can_hold_is_refused_at_its_place(model: ChatDLite, schema: Any, place: str) -> None:
    grammars = model.runtime.grammars
    with pytest.raises(UnsupportedSchemaError, match=place):
        grammars.json_schema(schema)
    within = {"type": "object", "properties": {"it": schema}, **{k: schema[k] for k in ("$defs",) if k in schema}}
    tools = [{"type": "function", "function": {"name": "t", "parameters": within}}]
    if "$ref': '#'" not in str(schema):  # there it would be the tool's arguments
        with pytest.raises(UnsupportedSchemaError, match="unsupported at t"):
            grammars.tool_call(tools, choice="t")


def test_what_may_end_is_not_refused(model: ChatDLite) -> None:
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}}}
    items = {"type": "array", "items": {"$ref": "#/$defs/x"}}
    for schema in ({**node, "required": ["next"]}, {**ENDLESS, "required": []}, items):
        model.runtime.grammars.json_schema({**schema, "$defs": {"x": schema}})
    model.runtime.grammars.json_schema(nested(40))
