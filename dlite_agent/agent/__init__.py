"""LangChain middleware that small local models need, and a short way to an agent that has it."""

from __future__ import annotations

from dlite_agent.agent.compaction import PrefixCompaction
from dlite_agent.agent.drift_reporter import DriftReporter
from dlite_agent.agent.factory import create_dlite_agent
from dlite_agent.agent.invalid_calls import InvalidCallRetry
from dlite_agent.agent.plan import PlanMiddleware
from dlite_agent.agent.repeat_guard import RepeatGuard
from dlite_agent.agent.results import ResultShaper
from dlite_agent.agent.session import SessionMiddleware

__all__ = [
    "DriftReporter",
    "InvalidCallRetry",
    "PlanMiddleware",
    "PrefixCompaction",
    "RepeatGuard",
    "ResultShaper",
    "SessionMiddleware",
    "create_dlite_agent",
]
