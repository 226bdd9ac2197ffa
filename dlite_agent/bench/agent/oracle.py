"""The recorded calls of benchmarks, done again through our tools: the same results, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from langchain_core.messages import AIMessage, ToolMessage

from dlite_agent.bench.journal import Journal
from dlite_agent.environments import LiveTask, environment_tools, open_environment


@dataclass(frozen=True, slots=True)
class OracleReport:
    """What the recorded calls of a session gave.

    Attributes:
        session: Its name.
        calls: How many there are.
        equal: How many gave the recorded result.
        is_end_equal: Whether the end state is the benchmark's own.
        differing: The first call that gave another: its name, the recorded result, ours.
    """

    session: str
    calls: int
    equal: int
    is_end_equal: bool
    differing: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> OracleReport:
        """Read a report of a journal."""
        return cls(**{**fields, "differing": tuple(fields["differing"])})


def run_oracle(task: LiveTask) -> OracleReport:
    """Do the calls of one session through LangChain tools, in their order.

    Raises:
        MissingDependencyError: If the benchmark's package is not installed.
    """
    environment = open_environment(task)
    tools = {tool.name: tool for tool in environment_tools(environment, task.session.tools)}
    messages = task.session.messages
    results = {message.tool_call_id: message.text for message in messages if isinstance(message, ToolMessage)}
    calls = [call for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
    differing: list[tuple[str, str, str]] = []
    for call in calls:
        got = str(tools[call["name"]].invoke(call["args"]))
        if got != results[str(call["id"])]:
            differing.append((call["name"], results[str(call["id"])], got))
    first = differing[0] if differing else ()
    return OracleReport(
        task.session.id, len(calls), len(calls) - len(differing), environment.end_state().is_equal, first
    )


def run_oracles(tasks: Sequence[LiveTask], *, journal: Journal, say: Callable[[str], None]) -> list[OracleReport]:
    """Do the calls of all sessions that the journal does not hold; returns the reports of all."""
    finished = {report.session: report for report in map(OracleReport.from_dict, journal.reports())}
    for number, task in enumerate(tasks, start=1):
        if task.session.id not in finished:
            report = finished[task.session.id] = run_oracle(task)
            journal.add(asdict(report))
            if report.equal < report.calls or not report.is_end_equal:
                say(f"{report.session}: {report.equal} of {report.calls} calls equal, first: {report.differing}")
        if number % 50 == 0:
            say(f"{number} of {len(tasks)} sessions' recorded calls")
    return [finished[task.session.id] for task in tasks]


def equal_percent(reports: Sequence[OracleReport]) -> float:
    """Return the share of calls that gave the recorded result."""
    return 100 * sum(report.equal for report in reports) / max(1, sum(report.calls for report in reports))
