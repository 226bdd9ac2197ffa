"""The prompts a benchmark decodes are those the model is given where the recorded assistant spoke."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from langchain_core.messages import AIMessage

from dlite_agent import runtime as runtimes
from dlite_agent.bench.prompts import EXCERPT, RecordedPrompt, choose, recorded_sessions, session_prompts
from dlite_agent.config import Settings
from dlite_agent.errors import ConfigError
from dlite_agent.runtime import Runtime
from dlite_agent.testing import write_tiny_chat_model

MOST_BYTES = 150_000


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    home = tmp_path_factory.mktemp("home")
    folder = write_tiny_chat_model(home / "model")
    settings = Settings(home=home, threads=1, offline=True)
    yield runtimes.shared_runtime(str(folder), drafter="null", quantize=None, store=None, settings=settings)
    runtimes.close_all()


def test_the_excerpt_is_small_and_carries_its_licences() -> None:
    files = [path for path in EXCERPT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    notice = (EXCERPT / "NOTICE").read_text()
    for licence in EXCERPT.glob("LICENSE*"):
        assert licence.name in notice
    for sessions in EXCERPT.glob("agent/*.jsonl"):
        assert f"agent/{sessions.name}" in notice


def test_every_call_of_the_excerpt_is_to_a_tool_that_was_offered() -> None:
    for session in recorded_sessions():
        for index, message in enumerate(session.messages):
            offered = {tool["function"]["name"] for tool in session.tools_at(index)}
            assert {call["name"] for call in getattr(message, "tool_calls", ())} <= offered


def test_the_excerpt_has_tool_calls_and_prose_of_several_families(runtime: Runtime) -> None:
    prompts = [prompt for session in recorded_sessions() for prompt in session_prompts(session, runtime)]
    assert {prompt.family for prompt in prompts} == {"bfcl_mt", "tooltalk"}
    assert sum(prompt.kind == "tool" for prompt in prompts) >= 12
    assert sum(prompt.kind == "prose" for prompt in prompts) >= 4


def test_a_prompt_is_the_conversation_before_the_recorded_reply(runtime: Runtime) -> None:
    for session in recorded_sessions():
        places = [index for index, message in enumerate(session.messages) if isinstance(message, AIMessage)]
        prompts = list(session_prompts(session, runtime))
        assert [prompt.turn for prompt in prompts] == list(range(len(places)))
        for index, prompt in zip(places, prompts, strict=True):
            message = session.messages[index]
            assert isinstance(message, AIMessage)
            assert prompt.kind == ("tool" if message.tool_calls else "prose")
            text = runtime.render(session.messages[:index], session.tools_at(index))
            assert runtime.encoder.decode(prompt.ids) == text


def test_the_next_prompt_of_a_session_begins_with_the_ids_of_the_one_before(runtime: Runtime) -> None:
    header = len(runtime.encoder.encode("<|im_start|>assistant\n"))
    for session in recorded_sessions():
        prompts = list(session_prompts(session, runtime))
        for before, after in pairwise(prompts):
            shared = len(before.ids) - header
            assert after.ids[:shared] == before.ids[:shared]


def prompts_of(lengths: list[int]) -> list[RecordedPrompt]:
    kinds = ("tool", "prose")
    return [RecordedPrompt("s", i, "f", kinds[i % 2], (1,) * length) for i, length in enumerate(lengths)]  # type: ignore[arg-type]


def test_chosen_prompts_are_of_the_kind_fit_and_come_from_everywhere() -> None:
    prompts = prompts_of([5] * 20 + [50] * 2)
    chosen = choose(prompts, "tool", 5, max_tokens=5)
    assert [prompt.turn for prompt in chosen] == [0, 4, 8, 12, 16]
    assert choose(prompts, "prose", 100, max_tokens=50) == [p for p in prompts if p.kind == "prose"]
    assert choose(prompts, "tool", 5, max_tokens=4) == []


def test_a_subset_of_the_excerpt_is_refused() -> None:
    with pytest.raises(ConfigError, match="--workloads"):
        recorded_sessions(subset="bench_small")


def test_a_subset_and_a_limit_are_kept_to(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    records = [{"id": f"a/{n}", "messages": [{"role": "user", "content": "hi"}]} for n in range(4)]
    (tmp_path / "agent" / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "subsets.json").write_text(json.dumps({"some": ["a/1", "a/3"], "none": ["b/1"]}))
    assert [session.id for session in recorded_sessions(tmp_path, subset="some")] == ["a/1", "a/3"]
    assert [session.id for session in recorded_sessions(tmp_path, limit=2)] == ["a/0", "a/1"]
    with pytest.raises(ConfigError, match="none of the sessions"):
        recorded_sessions(tmp_path, subset="none")
