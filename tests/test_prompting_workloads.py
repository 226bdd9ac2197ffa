"""Two thousand recorded tool calls, written in every dialect, come back equal however the reply is cut."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.prompting.dialects import DIALECTS, GENERIC, Dialect
from dlite_agent.prompting.parser import StreamParser, ToolCall

Calls = list[tuple[str, dict[str, Any]]]
Schemas = dict[str, dict[str, Any]]


def exact(calls: Calls) -> str:
    """A text that tells 1, 1.0 and True apart."""
    return json.dumps(calls, sort_keys=True)


NUM_CALLS = 2000
WORKLOADS = Path(__file__).resolve().parents[2] / "shared" / "workloads"


def workload_turns() -> list[tuple[Calls, Schemas]]:
    """Calls of recorded sessions, message by message, and the schemas of each session's tools."""
    toolsets: dict[str, Schemas] = {}
    for path in (WORKLOADS / "tools").rglob("*.json"):
        functions = [tool["function"] for tool in json.loads(path.read_text(encoding="utf-8"))]
        toolsets[path.relative_to(WORKLOADS / "tools").with_suffix("").as_posix()] = {
            f["name"]: f["parameters"] for f in functions
        }
    turns: list[tuple[Calls, Schemas]] = []
    for path in sorted((WORKLOADS / "agent").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            schemas = {name: schema for toolset in record["toolsets"] for name, schema in toolsets[toolset].items()}
            for message in record["messages"]:
                functions = [call["function"] for call in message.get("tool_calls") or ()]
                if functions:
                    turns.append(([(f["name"], json.loads(f["arguments"])) for f in functions], schemas))
    return turns


@pytest.fixture(scope="module")
def workload() -> list[tuple[Calls, Schemas]]:
    if not WORKLOADS.is_dir():
        pytest.skip("the shared workloads are not beside this clone")
    rng = random.Random(0)
    grouped: list[tuple[Calls, Schemas]] = []  # neighbours of one session become calls of one message
    for calls, schemas in workload_turns():
        if grouped and grouped[-1][1] is schemas and len(grouped[-1][0]) < rng.randint(1, 3):
            grouped[-1][0].extend(calls)
        else:
            grouped.append(([*calls], schemas))
    rng.shuffle(grouped)
    num_calls = size = 0
    while num_calls < NUM_CALLS:
        num_calls += len(grouped[size][0])
        size += 1
    return grouped[:size]


@pytest.mark.parametrize("dialect", [*DIALECTS, GENERIC], ids=lambda dialect: dialect.name)
def test_two_thousand_real_calls_come_back_equal(dialect: Dialect, workload: list[tuple[Calls, Schemas]]) -> None:
    rng = random.Random(1)
    num_equal = 0
    for index, (turn, schemas) in enumerate(workload):
        reply = dialect.write(turn, schemas)
        points = sorted(rng.randrange(len(reply)) for _ in range(4))
        pieces = [reply[a:b] for a, b in zip([0, *points], [*points, len(reply)], strict=True)]
        for cut_reply in ([reply], pieces, *([list(reply)] if index % 20 == 0 else [])):
            parser = StreamParser(dialect, schemas)
            events = [event for piece in cut_reply for event in parser.feed(piece)] + parser.close(truncated=False)
            assert exact([(e.name, e.args) for e in events if isinstance(e, ToolCall)]) == exact(turn)
            assert len(events) == len(turn)
        num_equal += len(turn)
    assert num_equal >= NUM_CALLS
