"""Forced calls of 300 random schemas on random weights: each is valid, or its schema is refused at a path."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from langchain_core.messages import AIMessage

from dlite_agent import ChatDLite, Settings
from dlite_agent.errors import UnsupportedSchemaError
from dlite_agent.prompting.dialects import FUNCTIONGEMMA, GENERIC, LFM2, LLAMA3, MISTRAL_ARGS, QWEN3_CODER, Dialect
from dlite_agent.runtime import close_all
from dlite_agent.testing import byte_tokenizer, write_tiny_chat_model

Schema = dict[str, Any]

NUM_SCHEMAS = 300
NUM_CUT = 60
NUM_PER_DIALECT = 25
QUOTE = chr(34)
LONG = 1500
"""Tokens within which a reply ends, since the model is made to like what closes strings and lists."""

KEYS = ["city", "größe", "名前", "é🙂", "a b", "x/y", "type", "enum", "properties", "$ref", "required", "0"]
ODD_KEYS = ['qu"ote', "back\\slash", "new\nline"]
TOOLS = ["f", "get_weather", "größe", "天気"]
TEXTS = ["day", "week", "°C", "ja, nein", "</tool_call>", 'a "b"', "\\", "", "naïve", "東京"]
PATTERNS = [
    r"^[a-z]{2,4}$",
    r"^\d{3}-\d{2}$",
    r"^(ja|nein)$",
    r"^[äöüß]{1,3}$",
    r"^[^\"\\]{1,5}$",
    r"^$",
    r"[A-Z]",
    r"^x",
]


class Schemas:
    """Makes random schemas, each of which something satisfies."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names: list[str] = []

    def tool(self) -> dict[str, Any]:
        self.names = self.rng.sample(["Place", "Größe", "名", "a.b"], self.rng.randint(0, 3))
        definitions = {name: self.objects(1) for name in self.names}  # nested in themselves by properties only
        parameters = {**self.objects(3), **({"$defs": definitions} if definitions else {})}
        function = {"name": self.rng.choice(TOOLS), "description": "A tool.", "parameters": parameters}
        return {"type": "function", "function": function}

    def part(self, depth: int) -> Schema:
        simple: list[Callable[[], Schema]] = [self.strings, self.numbers, self.listed, self.types, self.patterns]
        nested: list[Callable[[], Schema]] = [
            lambda: self.objects(depth - 1),
            lambda: self.arrays(depth - 1),
            lambda: {"anyOf": [self.part(depth - 1) for _ in range(self.rng.randint(2, 3))]},
        ]
        if self.names and depth < 3 and self.rng.random() < 0.2:
            return {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{self.rng.choice(self.names)}"}]}
        if self.rng.random() < 0.06:
            return self.rare(depth)
        return self.rng.choice(simple + nested * (depth > 0))()

    def objects(self, depth: int) -> Schema:
        keys = self.rng.sample(KEYS + ODD_KEYS, self.rng.randint(1, 4))
        schema: Schema = {"type": "object", "properties": {key: self.part(depth) for key in keys}}
        if self.rng.random() < 0.8:
            schema["required"] = self.rng.sample(keys, self.rng.randint(0, len(keys)))
        more = self.rng.choice([None, None, False, True, {"type": "integer"}])
        return schema if more is None else {**schema, "additionalProperties": more}

    def arrays(self, depth: int) -> Schema:
        least = self.rng.randint(0, 2)
        schema: Schema = {"type": "array", "items": self.part(depth), "minItems": least}
        if self.rng.random() < 0.3:
            schema["prefixItems"] = [self.part(0)]
        return {**schema, "maxItems": least + self.rng.randint(0, 2)} if self.rng.random() < 0.7 else schema

    def strings(self) -> Schema:
        least = self.rng.randint(0, 3)
        bounds = {"minLength": least, "maxLength": least + self.rng.randint(0, 5)}
        return {"type": "string", **{key: bounds[key] for key in bounds if self.rng.random() < 0.6}}

    def patterns(self) -> Schema:
        return {"type": "string", "pattern": self.rng.choice(PATTERNS)}

    def numbers(self) -> Schema:
        kind = self.rng.choice(["integer", "number"])
        least = self.rng.choice([-1000, -7, -0.5, 0, 3, 12.25])
        most = least + self.rng.choice([1, 2.5, 40, 5000])
        lower = self.rng.choice(["minimum", "exclusiveMinimum"])
        upper = self.rng.choice(["maximum", "exclusiveMaximum"])
        if kind == "integer":
            most += 2  # so that there is one between
        return {
            "type": kind,
            **{key: value for key, value in ((lower, least), (upper, most)) if self.rng.random() < 0.8},
        }

    def listed(self) -> Schema:
        values: list[Any] = [*self.rng.sample(TEXTS, 3), 1, -2.5, 1e21, True, None, {"a": [1]}, []]
        if self.rng.random() < 0.3:
            return {"const": self.rng.choice(values)}
        return {"enum": self.rng.sample(values, self.rng.randint(1, 4))}

    def types(self) -> Schema:
        kinds = self.rng.sample(["string", "integer", "number", "boolean", "null"], self.rng.randint(1, 3))
        return {"type": kinds[0] if len(kinds) == 1 else kinds}

    def rare(self, depth: int) -> Schema:
        """What a grammar may well be unable to hold."""
        part = self.part(depth - 1) if depth > 0 else {"type": "string"}
        return self.rng.choice(
            [
                {"not": part},
                {"oneOf": [part, {"type": "integer"}]},
                {"allOf": [part]},
                {"type": "array", "items": part, "uniqueItems": True},
                {"type": "integer", "multipleOf": 7},
                {"type": "string", "pattern": r"^(?=a)b?a$"},
                {"type": "string", "format": self.rng.choice(["date", "uuid", "email", "no-such"])},
                {"type": "object", "propertyNames": {"pattern": "^a"}, "minProperties": 1},
                {"type": "object", "patternProperties": {"^a": part}},
                {},
            ]
        )


def tools_of(count: int) -> list[dict[str, Any]]:
    return [Schemas(seed).tool() for seed in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatDLite]:
    folder = write_tiny_chat_model(tmp_path_factory.mktemp("model"), max_position_embeddings=16384)
    settings = Settings(home=tmp_path_factory.mktemp("home"), redis_url=None, threads=1, offline=True)
    ids = byte_tokenizer().convert_tokens_to_ids
    liked = {ids(closer): 8.0 if closer == QUOTE else 5.0 for closer in QUOTE + "]})>"}
    yield ChatDLite(model=str(folder), settings=settings, temperature=1.0, max_tokens=LONG, logit_bias=liked)
    close_all()


def call(model: ChatDLite, tools: list[dict[str, Any]]) -> list[AIMessage | UnsupportedSchemaError]:
    """The reply to a forced call of each tool, several at once."""

    def reply(seed: int) -> AIMessage | UnsupportedSchemaError:
        bound = model.bind_tools([tools[seed]], tool_choice=tools[seed]["function"]["name"], seed=seed)
        try:
            return bound.invoke("go")
        except UnsupportedSchemaError as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(reply, range(len(tools))))


def check(tool: dict[str, Any], reply: AIMessage | UnsupportedSchemaError, *, may_be_cut: bool = False) -> bool:
    """Whether there is a call; if so, it is valid, and if not, the schema was refused where it says."""
    name, schema = tool["function"]["name"], tool["function"]["parameters"]
    if isinstance(reply, UnsupportedSchemaError):
        assert re.match(r"(?s)unsupported at .+: .+", str(reply)), reply
        return False
    if may_be_cut and reply.response_metadata["finish_reason"] == "length":
        assert not reply.tool_calls and reply.invalid_tool_calls
        return False
    assert reply.response_metadata["finish_reason"] == "tool_calls", (schema, reply)
    assert [made["name"] for made in reply.tool_calls] == [name]
    errors = [error.message for error in Draft202012Validator(schema).iter_errors(reply.tool_calls[0]["args"])]
    assert not errors, (schema, reply.tool_calls, errors)
    assert not reply.invalid_tool_calls
    return True


def test_forced_calls_of_random_schemas_are_valid_or_the_schema_is_refused_at_a_path(model: ChatDLite) -> None:
    tools = tools_of(NUM_SCHEMAS)
    for tool in tools:
        Draft202012Validator.check_schema(tool["function"]["parameters"])
    num_valid = sum(check(tool, reply) for tool, reply in zip(tools, call(model, tools), strict=True))
    assert num_valid > NUM_SCHEMAS * 0.7


@pytest.mark.parametrize(("max_tokens", "begun"), [(3, "<to"), (30, "")])
def test_a_cut_call_says_so_and_is_never_half_a_call(model: ChatDLite, max_tokens: int, begun: str) -> None:
    """Where not even the tag is whole, it is text; behind it, what there is of the call is an invalid one."""
    tools = tools_of(NUM_CUT)
    cut = model.model_copy(update={"max_tokens": max_tokens})
    replies = [reply for reply in call(cut, tools) if not isinstance(reply, UnsupportedSchemaError)]
    assert len(replies) > NUM_CUT * 0.7
    assert {reply.response_metadata["finish_reason"] for reply in replies} == {"length"}
    assert {str(reply.content) for reply in replies} == {begun}
    assert {len(reply.invalid_tool_calls) for reply in replies} == {0 if begun else 1}
    assert not any(reply.tool_calls for reply in replies)


@pytest.mark.parametrize(
    "dialect", [LLAMA3, MISTRAL_ARGS, QWEN3_CODER, LFM2, FUNCTIONGEMMA], ids=lambda dialect: dialect.name
)
def test_in_other_dialects_they_are_valid_refused_or_cut(model: ChatDLite, dialect: Dialect) -> None:
    """Random weights may never write the tag that ends a text there."""
    assert model.runtime.template.dialect is GENERIC
    tools = tools_of(NUM_PER_DIALECT)
    speaking = model.model_copy(update={"dialect": dialect.name, "max_tokens": 400})
    replies = zip(tools, call(speaking, tools), strict=True)
    num_valid = sum(check(tool, reply, may_be_cut=True) for tool, reply in replies)
    assert num_valid > NUM_PER_DIALECT * 0.1
