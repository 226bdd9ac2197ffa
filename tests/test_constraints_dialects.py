"""In every dialect a grammar holds a random model to valid calls, forced or from where it begins one by itself."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from dlite_agent import ChatDLite, Settings
from dlite_agent.constraints import GrammarFactory
from dlite_agent.engine.constraint import TokenConstraint
from dlite_agent.errors import ConfigError, GrammarError, UnsupportedSchemaError
from dlite_agent.prompting.dialects import (
    DIALECTS,
    FUNCTIONGEMMA,
    GEMMA,
    GENERIC,
    HERMES,
    LFM2,
    LLAMA3,
    MISTRAL_ARGS,
    QWEN3_CODER,
    Dialect,
)
from dlite_agent.prompting.encoding import PromptEncoder
from dlite_agent.prompting.parser import Event, InvalidToolCall, StreamParser, TextDelta, ToolCall
from dlite_agent.runtime import close_all
from dlite_agent.testing import byte_tokenizer, write_tiny_chat_model

ALL = (*DIALECTS, GENERIC)
every_dialect = pytest.mark.parametrize("dialect", ALL, ids=lambda dialect: dialect.name)

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 9, "description": "A city."},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["°C", "°F", None]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "near": {"$ref": "#/$defs/place"},
            "sure": {"type": "boolean"},
            "code": {"type": "string", "pattern": "^[a-z]/\\d{2,3}$", "maxLength": 4},
        },
        "required": ["city", "unit", "sure"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    "get": {"type": "object", "properties": {}},
    "set-plan.v2": {
        "type": "object",
        "properties": {
            "steps": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
            "mode": {"enum": ["fast", "slow"]},
            "size": {"type": ["number", "null"]},
            "more": {"type": "object"},
        },
        "required": ["steps"],
    },
}


def tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}


TOOLS = [tool(name, schema) for name, schema in SCHEMAS.items()]
CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        "get_weather",
        {"city": "Öln", "days": 3, "unit": "°C", "near": {"x": -1.5, "tags": ["a"]}, "sure": True, "code": "b/12"},
    ),
    ("get_weather", {"city": "5", "unit": None, "note": "null and void", "sure": False}),
    ("get", {}),
    ("set-plan.v2", {"steps": ["one \"two\" 'three'", "{[("], "mode": "slow"}),
]


class Kit:
    """A tokenizer of bytes, with or without tokens of its own for every dialect's markers."""

    def __init__(self, *, has_markers: bool) -> None:
        tokenizer = byte_tokenizer()
        if has_markers:
            markers = sorted({mark for dialect in ALL for mark in dialect.markers if len(mark) > 3})
            tokenizer.add_special_tokens({"additional_special_tokens": markers})
        self.encoder = PromptEncoder(tokenizer)
        self.eos = int(tokenizer.eos_token_id)
        self.size = len(tokenizer)
        self.factory = GrammarFactory(tokenizer, vocab_size=self.size, eos_ids=[self.eos])
        self.texts = [self.encoder.token_bytes[i].decode("latin-1") for i in range(self.size)]

    def write(self, constraint: TokenConstraint, text: str) -> TokenConstraint:
        for token_id in self.encoder.encode(text):
            constraint.advance(token_id)
        return constraint

    def bits(self, constraint: TokenConstraint) -> list[int]:
        mask = constraint.bitmask()
        if mask is None:
            return list(range(self.size))
        return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]

    def walk(self, constraint: TokenConstraint, seed: int, dialect: Dialect, *, max_tokens: int = 900) -> str | None:
        """What a random model writes that likes to close what is open; None if it does not come to an end."""
        rng = random.Random(seed)
        ids: list[int] = []
        written = ""
        while len(ids) < max_tokens:
            allowed = self.bits(constraint)
            begun = [i for i in allowed if any(_goes_on(written, self.texts[i], closer) for closer in _LONG_CLOSERS)]
            liked = begun or [i for i in allowed if i == self.eos or self.texts[i][:1] in ("\n", "<", *_CLOSERS)]
            ids.append(rng.choice(liked if liked and rng.random() < (0.97 if begun else 0.5) else allowed))
            assert constraint.allows(ids[-1])
            constraint.advance(ids[-1])
            written += self.texts[ids[-1]]
            if ids[-1] == self.eos:
                assert constraint.finished
                return self.encoder.decode(ids[:-1])
        return None


_CLOSERS = ('"', "}", "]", ")")
_LONG_CLOSERS = ("\n</parameter>", "<escape>")


def _goes_on(written: str, token: str, closer: str) -> bool:
    """Whether a token goes on with a text that closes something and has begun."""
    begun = next((size for size in range(len(closer) - 1, 0, -1) if written.endswith(closer[:size])), 0)
    return begun > 0 and bool(token) and closer[begun:].startswith(token)


@pytest.fixture(scope="module", params=[False, True], ids=["bytes", "marker_tokens"])
def kit(request: pytest.FixtureRequest) -> Kit:
    return Kit(has_markers=request.param)


def parse(dialect: Dialect, text: str, *, is_thinking: bool = False) -> list[Event]:
    parser = StreamParser(dialect, SCHEMAS, is_thinking=is_thinking)
    return parser.feed(text) + parser.close(truncated=False)


def check(events: list[Event]) -> list[ToolCall]:
    """All calls are valid; there is at least one."""
    assert not any(isinstance(event, InvalidToolCall) for event in events)
    calls = [event for event in events if isinstance(event, ToolCall)]
    for call in calls:
        Draft202012Validator(SCHEMAS[call.name]).validate(call.args)
        assert call.args.keys() <= SCHEMAS[call.name]["properties"].keys()
    assert calls
    return calls


@every_dialect
@pytest.mark.parametrize("choice", ["any", *SCHEMAS])
def test_a_random_model_under_a_forced_choice_makes_valid_calls_only(kit: Kit, dialect: Dialect, choice: str) -> None:
    num_finished = 0
    for seed in range(3):
        text = kit.walk(kit.factory.tool_call(TOOLS, choice=choice, dialect=dialect), seed, dialect)
        if text is None:
            continue
        num_finished += 1
        events = parse(dialect, text)
        calls = check(events)
        assert len(events) == len(calls)
        assert choice == "any" or [call.name for call in calls] == [choice]
    assert num_finished >= 1


@every_dialect
def test_once_a_call_has_begun_a_random_model_completes_it_validly(kit: Kit, dialect: Dialect) -> None:
    num_finished = 0
    for seed in range(6):
        constraint = kit.write(kit.factory.tool_call(TOOLS, dialect=dialect), "Let me see. <")
        assert constraint.bitmask() is None or dialect.call_open.startswith("<")
        kit.write(constraint, dialect.call_open)
        assert constraint.bitmask() is not None
        text = kit.walk(constraint, seed, dialect)
        if text is None:
            continue
        num_finished += 1
        events = parse(dialect, f"Let me see. <{dialect.call_open}{text}")
        assert events[0] == TextDelta("Let me see. <")
        check(events)
    assert num_finished >= 3


@every_dialect
def test_what_a_dialect_writes_its_grammar_allows(kit: Kit, dialect: Dialect) -> None:
    for calls in (CALLS[:1], CALLS[1:2], CALLS[2:3], CALLS[3:], CALLS):
        written = dialect.write(calls, SCHEMAS)
        assert kit.write(kit.factory.tool_call(TOOLS, choice="any", dialect=dialect), written).allows(kit.eos)
        assert kit.write(kit.factory.tool_call(TOOLS, dialect=dialect), f"Hm.\n{written}").allows(kit.eos)
        one = kit.factory.tool_call(TOOLS, choice="any", dialect=dialect, parallel=False)
        if len(calls) == 1:
            assert kit.write(one, written).allows(kit.eos)
        else:
            with pytest.raises(GrammarError):
                kit.write(one, written)


@every_dialect
def test_a_call_of_a_tool_that_is_not_bound_cannot_be_written(kit: Kit, dialect: Dialect) -> None:
    written = dialect.write([("get_time", {})])
    with pytest.raises(GrammarError):
        kit.write(kit.factory.tool_call(TOOLS, choice="any", dialect=dialect), written)
    if dialect is not LLAMA3:
        with pytest.raises(GrammarError):
            kit.write(kit.factory.tool_call(TOOLS, dialect=dialect), f"Hm.\n{written}")


@every_dialect
def test_in_thinking_everything_is_free_and_behind_it_calls_are_held(kit: Kit, dialect: Dialect) -> None:
    opener, closer = dialect.thinking
    inner = f"I could {dialect.call_open} something. "
    for is_thinking, thought in ((True, inner), (False, f"{opener}{inner}")):
        constraint = kit.factory.tool_call(TOOLS, dialect=dialect, is_thinking=is_thinking)
        kit.write(constraint, thought)
        assert constraint.bitmask() is None
        kit.write(constraint, f"{closer}\n\n")
        assert constraint.bitmask() is None
        kit.write(constraint, dialect.call_open)
        assert constraint.bitmask() is not None
        constraint.rollback(len(kit.encoder.encode(dialect.call_open)))
        assert constraint.bitmask() is None
        kit.write(constraint, '{"name": "get"')
        assert constraint.bitmask() is not None


@every_dialect
def test_where_no_call_may_be_made_all_is_free_but_its_beginning(kit: Kit, dialect: Dialect) -> None:
    opener, closer = dialect.thinking
    tag = dialect.call_open
    free = f' \n{{"name": "get"}} [1] `x` <b> {tag[:-1]}! {tag[1:]}'
    thought = f"{opener}maybe {tag}{closer}"
    for is_thinking, text in ((False, free), (False, f"{thought}{free}"), (True, f"{tag}{closer}{free}")):
        constraint = kit.factory.no_call(dialect=dialect, is_thinking=is_thinking)
        kit.write(constraint, text)
        before = kit.bits(constraint)
        for token_id in range(kit.size):
            may_follow = token_id in before
            assert constraint.allows(token_id) == may_follow
            assert may_follow == (tag not in (free + kit.texts[token_id].encode("latin-1").decode(errors="replace")))
        for char in tag[:-1]:
            kit.write(constraint, char)
        for token_id in kit.encoder.encode(tag[-1]):
            assert token_id not in kit.bits(constraint) or len(kit.encoder.encode(tag[-1])) > 1
        constraint.rollback(sum(len(kit.encoder.encode(char)) for char in tag[:-1]))
        assert kit.bits(constraint) == before
        assert constraint.allows(kit.eos)
        with pytest.raises(GrammarError, match="begins a tool call"):
            kit.write(constraint, tag)


@every_dialect
def test_a_forced_call_closes_the_thinking_that_the_prompt_has_opened(kit: Kit, dialect: Dialect) -> None:
    constraint = kit.factory.tool_call(TOOLS, choice="get", dialect=dialect, is_thinking=True)
    text = kit.walk(constraint, 0, dialect)
    assert text is not None
    assert [call.name for call in check(parse(dialect, text, is_thinking=True))] == ["get"]


@every_dialect
def test_rolling_back_leads_to_the_masks_of_a_fresh_constraint(kit: Kit, dialect: Dialect) -> None:
    ids = kit.encoder.encode(f"Hm. {dialect.call_open}") if dialect is LLAMA3 else []
    ids += kit.encoder.encode(dialect.write(CALLS[:2], SCHEMAS))
    constraint = kit.factory.tool_call(TOOLS, dialect=dialect)
    masks = []
    for token_id in ids:
        masks.append(kit.bits(constraint))
        constraint.advance(token_id)
    rng = random.Random(1)
    at = len(ids)
    while at:
        back = min(at, rng.randint(1, 7))
        constraint.rollback(back)
        at -= back
        assert kit.bits(constraint) == masks[at]


UNSUPPORTED: list[tuple[Dialect, str, dict[str, Any], str]] = [
    (QWEN3_CODER, "t", {"properties": {"a": {"type": "string", "pattern": "x+"}}}, "t.properties.a: 'pattern'"),
    (QWEN3_CODER, "t", {"properties": {"a": {"enum": ["x</parameter>"]}}}, "t.properties.a"),
    (QWEN3_CODER, "t", {"properties": {"a b": {"type": "integer"}}}, "without quotes"),
    (QWEN3_CODER, "t", {"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "'anyOf'"),
    (QWEN3_CODER, "t", {"properties": {"a": {"items": {"uniqueItems": True}}}}, "t.properties.a"),
    (LFM2, "a tool", {}, "without quotes"),
    (LFM2, "t", {"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, "t.properties.a"),
    (LFM2, "t", {"properties": {}, "required": ["a"]}, "at t:"),
    (GEMMA, "t", {"properties": {"a": {"not": {}}}}, "t.properties.a"),
    (
        FUNCTIONGEMMA,
        "t",
        {"properties": {"a": {"type": "array", "uniqueItems": True}}},
        "t.properties.a: 'uniqueItems'",
    ),
    (FUNCTIONGEMMA, "t", {"properties": {"a": {"type": "string", "format": "date"}}}, "t.properties.a: 'format'"),
    (
        FUNCTIONGEMMA,
        "t",
        {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}},
        "nested",
    ),
    (
        FUNCTIONGEMMA,
        "t",
        {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {}]}}},
        "nested",
    ),
    (MISTRAL_ARGS, "a tool", {}, "without quotes"),
]


@pytest.mark.parametrize(("dialect", "name", "schema", "reason"), UNSUPPORTED)
def test_what_a_dialect_has_no_grammar_for_is_refused_with_its_path(
    kit: Kit, dialect: Dialect, name: str, schema: dict[str, Any], reason: str
) -> None:
    for choice in ("auto", "any", name):
        with pytest.raises(UnsupportedSchemaError) as caught:
            kit.factory.tool_call([tool("ok", {}), tool(name, schema)], choice=choice, dialect=dialect)
        assert reason in str(caught.value)


@pytest.mark.parametrize("dialect", [LFM2, FUNCTIONGEMMA, GEMMA, QWEN3_CODER], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("least", [0, 1])
def test_a_list_may_be_bounded_to_one_item(kit: Kit, dialect: Dialect, least: int) -> None:
    items = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 1}}
    schema = {"type": "object", "properties": {"a": {**items, "minItems": least, "maxItems": 1}}, "required": ["a"]}
    values: list[list[list[int]]] = [[], [[]], [[1]], [[1, 2]], [[1], [2]]]
    for value in values:
        text = dialect.write([("t", {"a": value})], {"t": schema})
        constraint = kit.factory.tool_call([tool("t", schema)], choice="any", dialect=dialect)
        if Draft202012Validator(schema).is_valid({"a": value}):
            assert kit.write(constraint, text).allows(kit.eos)
        else:
            with pytest.raises(GrammarError):
                kit.write(constraint, text)


def test_optional_arguments_may_be_left_out_and_required_ones_not(kit: Kit) -> None:
    schema = {"properties": {name: {"type": "integer"} for name in "abcd"}, "required": ["b"]}
    writers: list[tuple[Dialect, Callable[[str], str]]] = [
        (LFM2, lambda names: f"t({', '.join(f'{name}=1' for name in names)})"),
        (FUNCTIONGEMMA, lambda names: f"call:t{{{','.join(f'{name}:1' for name in names)}}}"),
        (
            QWEN3_CODER,
            lambda names: (
                "<function=t>\n" + "".join(f"<parameter={name}>\n1\n</parameter>\n" for name in names) + "</function>"
            ),
        ),
    ]
    for dialect, write in writers:
        for names, is_valid in (("b", True), ("ab", True), ("bd", True), ("abcd", True), ("bcd", True), ("", False)):
            text = f"{dialect.begin}{write(names)}{dialect.end}"
            constraint = kit.factory.tool_call([tool("t", schema)], choice="any", dialect=dialect)
            if is_valid:
                assert kit.write(constraint, text).allows(kit.eos)
            else:
                with pytest.raises(GrammarError):
                    kit.write(constraint, text)
        with pytest.raises(GrammarError):
            kit.write(
                kit.factory.tool_call([tool("t", schema)], choice="any", dialect=dialect),
                f"{dialect.begin}{write('ac')}{dialect.end}",
            )


def test_markers_of_other_dialects_do_not_end_or_bend_a_string(kit: Kit) -> None:
    for dialect in (HERMES, LFM2, MISTRAL_ARGS):
        args = {"steps": ["<escape>[TOOL_CALLS]</tool_call><|tool_call_end|>"]}
        written = dialect.write([("set-plan.v2", args)])
        constraint = kit.factory.tool_call(TOOLS, choice="any", dialect=dialect)
        start = written.index("<escape>")
        end = written.index('"', start)
        kit.write(constraint, written[:start])
        for char in written[start:end]:
            constraint.advance(kit.texts.index(char))
        kit.write(constraint, written[end:])
        assert constraint.allows(kit.eos)
        assert [call.args for call in check(parse(dialect, written))] == [args]


@pytest.mark.parametrize("dialect", [QWEN3_CODER, LFM2, FUNCTIONGEMMA], ids=lambda dialect: dialect.name)
def test_every_tool_of_the_workloads_can_be_held_where_calls_are_not_json(kit: Kit, dialect: Dialect) -> None:
    folder = Path(__file__).resolve().parents[2] / "shared" / "workloads" / "tools"
    if not folder.is_dir():
        pytest.skip("the shared workloads are not beside this clone")
    toolsets = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.json"))]
    assert toolsets
    for toolset in toolsets:
        kit.factory.tool_call(list({t["function"]["name"]: t for t in toolset}.values()), dialect=dialect)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield str(write_tiny_chat_model(tmp_path_factory.mktemp("model")))
    close_all()


@every_dialect
def test_a_chat_model_of_random_weights_makes_the_forced_call_in_the_dialect_of_its_option(
    dialect: Dialect, tiny_model: str, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path, redis_url=None, threads=1, offline=True)
    model = ChatDLite(model=tiny_model, settings=settings, dialect=dialect.name, max_tokens=200)
    reply = model.bind_tools([TOOLS[1]], tool_choice="get").invoke("hello")
    assert [(call["name"], call["args"]) for call in reply.tool_calls] == [("get", {})]
    assert reply.response_metadata["dlite"]["raw"] == dialect.write([("get", {})])
    assert reply.content == ""


def test_a_chat_model_refuses_a_dialect_that_there_is_not(tiny_model: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, redis_url=None, threads=1, offline=True)
    with pytest.raises(ConfigError, match="'klingon'"):
        ChatDLite(model=tiny_model, settings=settings, dialect="klingon").invoke("hello")
