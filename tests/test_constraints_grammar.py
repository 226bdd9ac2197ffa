"""Grammars hold every model, also a random one, to calls and JSON that parse and validate; text stays free."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dlite_agent.constraints import GrammarFactory
from dlite_agent.engine.constraint import TokenConstraint
from dlite_agent.errors import GrammarError, MissingDependencyError, UnsupportedSchemaError
from dlite_agent.prompting.dialects import HERMES
from dlite_agent.prompting.encoding import PromptEncoder
from dlite_agent.prompting.parser import InvalidToolCall, StreamParser, TextDelta, ToolCall


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["°C", "°F", None]},
        "spots": {"type": "array", "items": {"$ref": "#/$defs/spot"}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "$defs": {"spot": {"type": "object", "properties": {"x": {"type": "number"}, "naïve": {"type": "boolean"}}}},
}
TOOLS = [tool("get_weather", WEATHER), tool("get"), tool("get_plan", {"properties": {"a/b": {"type": "string"}}})]
SCHEMAS = {t["function"]["name"]: t["function"]["parameters"] or {} for t in TOOLS}

CORPUS = [
    'Sure. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
    '<tool_call>{"name": "get", "arguments": {}}</tool_call>;\n\n{"a": "b"}; [{"name": "get_weather", "x": 1}]',
    '```json\n{\n  "name": "get_plan",\n  "arguments": {"a/b": ""}\n}\n``` 5>3 x>{"y"} ","} "} "]',
]
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>"]


def build_tokenizer(*, has_tag_tokens: bool) -> Tokenizer:
    """Byte-level BPE with tokens that run across the beginning of a call."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL) + 60,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    pieces = [line[i : i + 7] for line in CORPUS for i in range(len(line))]
    tokenizer.train_from_iterator(pieces, trainer)
    crossing = [">\n{", '>{"', '>"', "> x", '"}', '",', '", ', '"x', "<tool_call>\n", "<tool_call> no", "x <tool_call>"]
    crossing += ['get"}', '"get", "', '{"name": "get", ', '{"name": "get"]', '"name": "get", "x']
    if has_tag_tokens:
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in crossing])
    return tokenizer


PADDING = 37  # the logits are longer than the vocabulary


class Kit:
    def __init__(self, *, has_tag_tokens: bool) -> None:
        self.tokenizer = build_tokenizer(has_tag_tokens=has_tag_tokens)
        self.encoder = PromptEncoder(self.tokenizer)
        self.num_tokens = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.vocab_size = self.num_tokens + PADDING
        self.eos_ids = self.ids("<|im_end|><|end|>")
        self.factory = GrammarFactory(self.tokenizer, vocab_size=self.vocab_size, eos_ids=self.eos_ids)
        closing = ['"', "}", "]", "\n</", "</tool_call>"]
        self.closing = {i for text in closing for i in self.tokenizer.encode(text, add_special_tokens=False).ids}
        self.closing |= set(self.eos_ids)

    def ids(self, text: str) -> list[int]:
        return self.encoder.encode(text)

    def spell(self, text: str) -> list[int]:
        """One token per byte."""
        assert text.isascii()
        return [self.tokenizer.encode(char, add_special_tokens=False).ids[0] for char in text]

    def bits(self, constraint: TokenConstraint) -> set[int]:
        mask = constraint.bitmask()
        if mask is None:
            return set(range(self.vocab_size))
        assert mask.shape == (-(-self.vocab_size // 32),)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert not bits[self.vocab_size :].any()
        return {int(i) for i in np.flatnonzero(bits[: self.vocab_size])}

    def walk(self, constraint: TokenConstraint, rng: random.Random, *, max_tokens: int = 300) -> list[int]:
        """A random model that prefers to close what is open; ends with an end token unless it runs out."""
        ids: list[int] = []
        while len(ids) < max_tokens:
            allowed = sorted(self.bits(constraint))
            closing = [i for i in allowed if i in self.closing]
            choice = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
            assert constraint.allows(choice)
            constraint.advance(choice)
            ids.append(choice)
            if choice in self.eos_ids:
                break
        return ids

    def text(self, ids: list[int]) -> str:
        return self.encoder.decode([i for i in ids if i not in self.eos_ids])


@pytest.fixture(scope="module", params=[True, False], ids=["tag_tokens", "tags_in_pieces"])
def kit(request: pytest.FixtureRequest) -> Kit:
    return Kit(has_tag_tokens=request.param)


def advance_all(constraint: TokenConstraint, ids: list[int]) -> TokenConstraint:
    for token_id in ids:
        constraint.advance(token_id)
    return constraint


def parse(text: str) -> list[Any]:
    parser = StreamParser(HERMES, SCHEMAS)
    return parser.feed(text) + parser.close(truncated=False)


def check_calls(text: str, *, names: set[str]) -> int:
    events = parse(text)
    calls = [event for event in events if isinstance(event, ToolCall)]
    assert not any(isinstance(event, InvalidToolCall) for event in events)
    for call in calls:
        assert call.name in names
        Draft202012Validator(SCHEMAS[call.name]).validate(call.args)
        assert not SCHEMAS[call.name].get("properties") or call.args.keys() <= SCHEMAS[call.name]["properties"].keys()
    return len(calls)


@pytest.mark.parametrize(("choice", "parallel"), [("any", True), ("any", False), ("get_weather", True)])
def test_a_random_model_under_a_forced_choice_makes_valid_calls_only(kit: Kit, choice: str, parallel: bool) -> None:
    names = set(SCHEMAS) if choice == "any" else {choice}
    num_finished = 0
    for seed in range(25):
        constraint = kit.factory.tool_call(TOOLS, choice=choice, parallel=parallel)
        ids = kit.walk(constraint, random.Random(seed))
        if ids[-1] not in kit.eos_ids:
            continue
        num_finished += 1
        num_calls = check_calls(kit.text(ids), names=names)
        assert num_calls >= 1
        assert num_calls == 1 or (parallel and choice == "any")
        assert constraint.finished
    assert num_finished >= 15


BEGINNINGS = [
    "<tool_call>",
    "Well <b>.\n<tool_call>\n",
    '{"name": "get_weather"',
    ' {"name":"get"',
    '```json\n{\n  "name" : "get_plan"',
    '[{"name": "get"',
    '<tools>\n{"name": "get_plan"',
]


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("parallel", [True, False])
def test_once_a_call_has_begun_a_random_model_completes_it_validly(kit: Kit, beginning: str, parallel: bool) -> None:
    num_finished = 0
    for seed in range(12):
        constraint = kit.factory.tool_call(TOOLS, parallel=parallel)
        begun = kit.ids(beginning)
        advance_all(constraint, begun)
        assert constraint.bitmask() is not None
        ids = kit.walk(constraint, random.Random(seed))
        if ids[-1] not in kit.eos_ids:
            continue
        num_finished += 1
        num_calls = check_calls(kit.text(begun + ids), names=set(SCHEMAS))
        assert num_calls >= 1
        assert num_calls == 1 or parallel
    assert num_finished >= 5


def test_auto_leaves_text_free_until_a_call_begins(kit: Kit) -> None:
    texts = [
        "Plain text, 5 > 3, with {braces} and <tool tags>.",
        '{"name": "Paris", "size": 2}',
        '{"city": "get_weather"}',
        '```json\n{"name": "get_w", "x": 1}\n```',
        'Look: {"name": "get_weather", 5}',
        "<tool_calls> are <tool_ call>",
    ]
    for text in texts:
        constraint = kit.factory.tool_call(TOOLS)
        for token_id in kit.spell(text):
            assert constraint.allows(token_id)
            constraint.advance(token_id)
            assert constraint.forced(8) == []
        tokens = [kit.encoder.token_bytes[i] for i in set(range(kit.vocab_size)) - kit.bits(constraint)]
        assert all(b"<tool_call>" in token for token in tokens)
        assert not constraint.finished
        constraint.advance(kit.eos_ids[1])
        assert constraint.finished
        assert kit.bits(constraint) == set(kit.eos_ids)
        constraint.rollback(1)
        assert not constraint.finished
        assert len(kit.bits(constraint)) == kit.vocab_size - len(tokens)


def is_call_or_free(text: str) -> bool:
    """Whether the text begins no call, or a call in a way that a call goes on."""
    head = r'\s*(?:(?:```(?:json)?|<tools>)\s*)?(?:\[\s*)?\{\s*"name"\s*:\s*"(?:get_weather|get_plan|get)"'
    if "<tool_call>" in text:
        rest = text.split("<tool_call>", 1)[1]
        calls = [f'{space}{{"name": "{name}", "arguments": {{' for space in ("", " ", "\n") for name in SCHEMAS]
        return any(call.startswith(rest) for call in calls)
    begun = re.match(head, text)
    return begun is None or ', "arguments": {'.startswith(text[begun.end() :])


@pytest.mark.parametrize(
    "text", ["5 <tool_call", '\n{ "name": "get_weather', '[{"name": "get', '```\n{"name":"get_plan']
)
def test_a_token_across_the_beginning_of_a_call_is_allowed_if_and_only_if_a_call_goes_on_so(
    kit: Kit, text: str
) -> None:
    control = {kit.tokenizer.token_to_id(special) for special in SPECIAL}
    num_begun = num_vetoed = 0
    for size in range(len(text) + 1):
        constraint = advance_all(kit.factory.tool_call(TOOLS), kit.spell(text[:size]))
        for token_id in set(range(kit.num_tokens)) - control:
            token = kit.encoder.token_bytes[token_id]
            is_allowed = constraint.allows(token_id)
            assert is_allowed == is_call_or_free(text[:size] + token.decode("latin-1"))
            if not is_allowed:
                num_vetoed += 1
                with pytest.raises(GrammarError):
                    constraint.advance(token_id)
                continue
            constraint.advance(token_id)
            num_begun += constraint.bitmask() is not None and token.endswith((b">", b'"', b"{", b" ", b","))
            constraint.rollback(1)
    assert num_begun > 10
    assert num_vetoed > 3


def constraints(kit: Kit) -> list[tuple[Callable[[], TokenConstraint], str]]:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    return [
        (lambda: kit.factory.tool_call(TOOLS, choice="any"), ""),
        (lambda: kit.factory.tool_call(TOOLS), "Hi é <tool_call>\n"),
        (lambda: kit.factory.tool_call(TOOLS), '{"name": "get_weather"'),
        (lambda: kit.factory.json_schema(schema), ""),
        (lambda: kit.factory.regex(r"[ab]{3,5}-\d+ (é|🙂)*x"), ""),
    ]


def test_rolling_back_leads_to_the_masks_of_a_fresh_constraint(kit: Kit) -> None:
    for make, beginning in constraints(kit):
        for seed in range(4):
            rng = random.Random(seed)
            ids = kit.ids(beginning) + kit.walk(advance_all(make(), kit.ids(beginning)), rng, max_tokens=40)
            masks = []
            constraint = make()
            for token_id in ids:
                masks.append(kit.bits(constraint))
                constraint.advance(token_id)
            masks.append(kit.bits(constraint))
            at = len(ids)
            for _ in range(12):
                back = rng.randint(0, at)
                constraint.rollback(back)
                at -= back
                assert kit.bits(constraint) == masks[at]
                ahead = rng.randint(0, len(ids) - at)
                advance_all(constraint, ids[at : at + ahead])
                at += ahead
                assert kit.bits(constraint) == masks[at]


def test_forced_tokens_are_those_the_masks_leave_no_choice_about(kit: Kit) -> None:
    num_forced = 0
    for make, beginning in constraints(kit):
        for seed in range(3):
            constraint = advance_all(make(), kit.ids(beginning))
            for token_id in kit.walk(advance_all(make(), kit.ids(beginning)), random.Random(seed), max_tokens=60):
                forced = constraint.forced(5)
                num_forced += len(forced)
                before = kit.bits(constraint)
                for one in forced:
                    assert kit.bits(constraint) == {one}
                    constraint.advance(one)
                assert len(forced) == 5 or len(kit.bits(constraint)) > 1 or constraint.finished
                constraint.rollback(len(forced))
                assert kit.bits(constraint) == before
                assert constraint.forced(0) == []
                constraint.advance(token_id)
    assert num_forced > 100


def test_a_token_that_may_not_follow_changes_nothing(kit: Kit) -> None:
    for make, beginning in constraints(kit):
        constraint = advance_all(make(), kit.ids(beginning))
        before = kit.bits(constraint)
        outside = [i for i in range(kit.vocab_size + 2) if i not in before]
        for token_id in outside[:20] + outside[-5:] + [-1]:
            assert not constraint.allows(token_id)
            with pytest.raises(GrammarError):
                constraint.advance(token_id)
        assert kit.bits(constraint) == before
        with pytest.raises(GrammarError, match="roll back"):
            constraint.rollback(10_000)
        assert kit.bits(constraint) == before


def test_a_finished_grammar_allows_end_tokens_only_and_ids_without_a_token_never(kit: Kit) -> None:
    constraint = kit.factory.tool_call(TOOLS, choice="get", parallel=False)
    while not constraint.finished:
        allowed = kit.bits(constraint)
        assert max(allowed) < kit.num_tokens
        constraint.advance((constraint.forced(1) or sorted(allowed, key=lambda i: i not in kit.closing))[0])
    assert kit.bits(constraint) == set(kit.eos_ids)
    assert constraint.forced(4) == []
    advance_all(constraint, [kit.eos_ids[0]])
    assert kit.bits(constraint) == set(kit.eos_ids)


def test_calls_are_written_with_the_white_space_of_the_templates(kit: Kit) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": [1, {"b": 2}]}, "c": {"const": "é"}},
        "required": ["a", "c"],
    }
    constraint = kit.factory.tool_call([tool("t", schema)], choice="any", parallel=False)
    ids: list[int] = []
    while not constraint.finished:
        ids.append(min(kit.bits(constraint), key=lambda i: -len(kit.encoder.token_bytes[i])))
        constraint.advance(ids[-1])
    assert kit.text(ids) == HERMES.format_call("t", {"a": [1, {"b": 2}], "c": "é"})


def test_a_random_model_under_a_schema_writes_json_of_it(kit: Kit) -> None:
    schemas: list[dict[str, Any]] = [
        WEATHER,
        {"type": "object"},
        {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}, "minItems": 1}]},
        {"type": "string", "pattern": "^[a-z]{2}é?$"},
        {"type": "object", "properties": {"next": {"$ref": "#"}, "v": {"type": "null"}}, "required": ["v"]},
    ]
    num_finished = 0
    for schema in schemas:
        for seed in range(8):
            ids = kit.walk(kit.factory.json_schema(schema), random.Random(seed))
            if ids[-1] in kit.eos_ids:
                num_finished += 1
                Draft202012Validator(schema).validate(json.loads(kit.text(ids)))
    assert num_finished > 20


@pytest.mark.parametrize("name", ["Größe", "名前", "a b", "a.b", "Page[int]", '"', "a%b"])
def test_a_definition_may_have_any_name(kit: Kit, name: str) -> None:
    part = {"type": "object", "properties": {"$ref": {"type": "integer"}, "next": {"$ref": f"#/$defs/{name}"}}}
    schema = {"$defs": {name: part}, "type": "object", "properties": {"a": {"$ref": f"#/$defs/{name}"}}}
    for seed in range(4):
        ids = kit.walk(kit.factory.json_schema(schema), random.Random(seed))
        assert ids[-1] in kit.eos_ids
        Draft202012Validator(schema).validate(json.loads(kit.text(ids)))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"not": {"type": "string"}}}}, "t.properties.a"),
        ({"properties": {"a": {"items": {"uniqueItems": True, "type": "array"}}}}, "t.properties.a.items"),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "float"}}}, "t.$defs.A"),
        (
            {"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "string", "format": "odd"}]}}},
            "t.properties.a.anyOf[1]",
        ),
        ({"properties": {"a": {"$ref": "#/$defs/B"}}}, "t.properties.a"),
        ({"type": "object", "dependentRequired": {}}, "at t:"),
    ],
)
def test_a_schema_that_no_grammar_can_hold_is_refused_with_its_path(
    kit: Kit, schema: dict[str, Any], path: str
) -> None:
    for choice in ("auto", "any", "t"):
        with pytest.raises(UnsupportedSchemaError) as caught:
            kit.factory.tool_call([tool("ok"), tool("t", schema)], choice=choice)
        assert path in str(caught.value)
    with pytest.raises(UnsupportedSchemaError):
        kit.factory.json_schema(schema)


def test_choices_and_tools_that_cannot_be_held_are_refused(kit: Kit) -> None:
    with pytest.raises(GrammarError, match="'nope'"):
        kit.factory.tool_call(TOOLS, choice="nope")
    with pytest.raises(GrammarError, match="none of the 0"):
        kit.factory.tool_call([])
    with pytest.raises(GrammarError, match="no other tool"):
        kit.factory.tool_call([tool("a"), tool("a")])
    with pytest.raises(GrammarError):
        kit.factory.regex("(")


def test_every_tool_of_the_workloads_can_be_held(kit: Kit) -> None:
    folder = Path(__file__).resolve().parents[2] / "shared" / "workloads" / "tools"
    if not folder.is_dir():
        pytest.skip("the shared workloads are not beside this clone")
    toolsets = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.json"))]
    assert toolsets
    for toolset in toolsets:
        by_name = {t["function"]["name"]: t for t in toolset}
        kit.factory.tool_call(list(by_name.values()))


def test_text_events_of_a_held_reply_are_the_text_before_the_call(kit: Kit) -> None:
    beginning = kit.ids("Let me see.\n<tool_call>")
    ids = kit.walk(advance_all(kit.factory.tool_call(TOOLS, parallel=False), beginning), random.Random(3))
    events = parse(kit.text(beginning + ids))
    assert events[0] == TextDelta("Let me see.")


def test_without_llguidance_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, kit: Kit) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match="pip install llguidance"):
        GrammarFactory(kit.tokenizer, vocab_size=kit.vocab_size, eos_ids=kit.eos_ids)


def test_a_schema_that_opens_its_objects_keeps_them_open(kit: Kit) -> None:
    for schema, is_open in (
        ({"properties": {"a": {"type": "string"}}}, False),
        ({"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}, True),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, True),
    ):
        constraint = kit.factory.json_schema({"type": "object", **schema})
        advance_all(constraint, kit.spell('{"'))
        assert constraint.allows(kit.spell("b")[0]) == is_open
