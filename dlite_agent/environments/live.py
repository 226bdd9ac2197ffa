"""Recorded sessions that can be run live, whatever benchmark they are from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from langchain_core.messages import HumanMessage
from langchain_core.tools import BaseTool, StructuredTool

from dlite_agent.environments.bfcl import BfclEnvironment
from dlite_agent.environments.state import EndState
from dlite_agent.environments.tau2 import Tau2Environment
from dlite_agent.errors import ConfigError
from dlite_agent.recorded import RecordedSession, read_records, read_sessions

__all__ = ["EndState", "Environment", "LiveTask", "environment_tools", "open_environment", "read_live_tasks"]


class Environment(Protocol):
    """What a benchmark lets an agent act on."""

    @property
    def names(self) -> frozenset[str]:
        """The calls there are."""
        ...

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Do a call, one at a time; what goes wrong is its result, in the benchmark's words."""
        ...

    def end_state(self) -> EndState:
        """Compare with a new environment in which the benchmark's own calls were done."""
        ...


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], Environment]] = {"bfcl": BfclEnvironment, "tau2": Tau2Environment}


@dataclass(frozen=True, slots=True)
class LiveTask:
    """A recorded session, and what it takes to run it live.

    Attributes:
        kind: The benchmark, "bfcl" or "tau2".
        session: What was recorded.
        facts: The record's `env`.
    """

    kind: str
    session: RecordedSession
    facts: Mapping[str, Any]

    @property
    def user_turns(self) -> list[str]:
        """What the user says, turn by turn."""
        return [message.text for message in self.session.messages if isinstance(message, HumanMessage)]


def read_live_tasks(path: Path, *, ids: Sequence[str] = ()) -> list[LiveTask]:
    """Read the recorded sessions that name a benchmark's environment; others are left out.

    Args:
        path: As for `read_sessions`.
        ids: Which sessions; empty for all.

    Raises:
        ConfigError: If a file or a record cannot be read.
    """
    files = sorted(path.glob("agent/*.jsonl")) if path.is_dir() else [path]
    facts = {record["id"]: _facts(record) for file in files for record in read_records(file)}
    live = {name: env for name, env in facts.items() if env is not None}
    wanted = [name for name in live if not ids or name in ids]
    sessions = read_sessions(path, ids=wanted) if wanted else ()
    return [LiveTask(live[session.id]["kind"], session, live[session.id]) for session in sessions]


def _facts(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a record says of its environment; of one of BFCL's sessions, its package has it too."""
    env = record.get("env")
    if env is None and record.get("source") == "bfcl_v4_multi_turn":
        return {"kind": "bfcl", "session": record["id"]}
    return env if isinstance(env, dict) and env.get("kind") in _KINDS else None


def open_environment(task: LiveTask) -> Environment:
    """Make the environment as it is before the first call.

    Raises:
        MissingDependencyError: If the benchmark's package is not installed.
        ConfigError: If the record does not say what the environment starts from.
    """
    try:
        return _KINDS[task.kind](task.facts)
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{task.session.id} has no environment that can be made ({error!r})") from error


def environment_tools(environment: Environment, tools: Sequence[Mapping[str, Any]]) -> list[BaseTool]:
    """Return LangChain tools that act on an environment.

    Args:
        environment: What they act on.
        tools: OpenAI-style dicts, whose names, descriptions and schemas the tools have.

    Raises:
        ConfigError: If the environment has no call of a tool's name.
    """
    return [_tool(environment, tool["function"]) for tool in tools]


def _tool(environment: Environment, function: Mapping[str, Any]) -> BaseTool:
    name = function["name"]
    if name not in environment.names:
        known = ", ".join(sorted(environment.names))
        raise ConfigError(f"the environment has no call {name!r}; expected one of {known}")

    def run(**arguments: Any) -> str:
        return environment.call(name, arguments)

    return StructuredTool.from_function(
        func=run, name=name, description=function["description"], args_schema=function["parameters"]
    )
