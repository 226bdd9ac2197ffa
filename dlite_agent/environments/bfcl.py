"""BFCL's multi-turn sessions: a file system, a trading account, a car and more, as Python classes of the benchmark."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlite_agent.environments.installed import BFCL
from dlite_agent.environments.state import EndState
from dlite_agent.errors import ConfigError

_ROOT = "bfcl_eval.eval_checker.multi_turn_eval"
_MODULES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
_STATELESS = ("MathAPI",)
_VARIANTS = ("base", "long_context", "miss_func", "miss_param")
_LOCK = threading.Lock()  # some of the classes share mutable constants


class BfclEnvironment:
    """Instances of the classes that one session involves; their public methods are the calls."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        """Make the instances.

        Args:
            facts: A record's `involved_classes`, `initial_config`, `long_context` and `ground_truth`; or `session`, the
                id of one, for which the package's own data are read.

        Raises:
            MissingDependencyError: If `bfcl-eval` is not installed.
            ConfigError: If a class is none of the benchmark's multi-turn classes, or the package has no such session.
        """
        self._facts = facts = packaged_facts(facts["session"]) if "session" in facts else facts
        self._instances = {name: _instance(name, facts) for name in facts["involved_classes"]}
        self._methods: dict[str, Callable[..., Any]] = {
            name: method
            for instance in self._instances.values()
            for name, method in inspect.getmembers(instance, inspect.ismethod)
            if not name.startswith("_")
        }

    @property
    def names(self) -> frozenset[str]:
        """The calls there are."""
        return frozenset(self._methods)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Do a call and return its result as the benchmark writes it; of an error, what it says."""
        return self._run(name, (), arguments)

    def call_source(self, source: str) -> str:
        """Do a call that is written in Python, as the benchmark's ground truth is.

        Raises:
            ConfigError: If it is no call of a method with literal arguments.
        """
        name, positional, named = parse_call(source)
        return self._run(name, positional, named)

    def end_state(self) -> EndState:
        """Compare all public attributes with instances that did the ground truth, by the benchmark's own checker."""
        checker = BFCL.load(f"{_ROOT}.multi_turn_checker")
        truth = BfclEnvironment(self._facts)
        for turn in self._facts["ground_truth"]:
            for source in turn:
                truth.call_source(source)
        found = checker.state_checker(self._instances, truth._instances)
        if found["valid"]:
            return EndState(is_equal=True)
        return EndState(is_equal=False, difference=f"{found['error_message']} {found['details']['differences']}")

    def _run(self, name: str, positional: Sequence[Any], named: Mapping[str, Any]) -> str:
        try:
            with _LOCK:
                return _as_text(self._methods[name](*copy.deepcopy(positional), **copy.deepcopy(dict(named))))
        except Exception as error:  # the benchmark's code runs here: whatever it raises is the call's result
            return f"Error during execution: {error}"


def parse_call(source: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Read a call of literal arguments, `name(1, key='x')`; nothing is evaluated.

    Raises:
        ConfigError: If it is none.
    """
    try:
        call = ast.parse(source.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("not a call of a name")
        positional = tuple(ast.literal_eval(argument) for argument in call.args)
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"{source!r} is no call with literal arguments ({error})") from error
    return call.func.id, positional, named


def packaged_facts(session_id: str) -> dict[str, Any]:
    """Read from the benchmark's package what a session starts from and its ground truth.

    Args:
        session_id: As recorded, `bfcl_mt/VARIANT/NUMBER`.

    Raises:
        MissingDependencyError: If `bfcl-eval` is not installed.
        ConfigError: If it has no such session.
    """
    variant, _, number = session_id.removeprefix("bfcl_mt/").partition("/")
    data = Path(BFCL.load("bfcl_eval").__file__).parent / "data"
    name, file = f"multi_turn_{variant}_{number}", f"BFCL_v4_multi_turn_{variant}.json"
    if variant not in _VARIANTS:
        raise ConfigError(f"{session_id!r} is no session of BFCL; expected bfcl_mt/VARIANT/NUMBER")
    entry, answer = _line(data / file, name), _line(data / "possible_answer" / file, name)
    kept = {key: entry[key] for key in ("involved_classes", "initial_config")}
    return {**kept, "long_context": variant == "long_context", "ground_truth": answer["ground_truth"]}


def _line(file: Path, name: str) -> dict[str, Any]:
    for line in file.read_text(encoding="utf-8").splitlines():
        fields: dict[str, Any] = json.loads(line)
        if fields["id"] == name:
            return fields
    raise ConfigError(f"{file} has no session {name!r}; install the release that {BFCL.command!r} names")


def _instance(name: str, facts: Mapping[str, Any]) -> Any:
    if name not in _MODULES:
        raise ConfigError(f"BFCL has no class {name!r} for sessions of many turns; expected {', '.join(_MODULES)}")
    instance = getattr(BFCL.load(f"{_ROOT}.func_source_code.{_MODULES[name]}"), name)()
    if name not in _STATELESS:
        scenario = copy.deepcopy(facts["initial_config"].get(name, {}))
        instance._load_scenario(scenario, long_context=facts["long_context"])
    return instance


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if not isinstance(result, dict):
        return str(result)
    try:
        return json.dumps(result)
    except (TypeError, ValueError):  # it holds an object of the benchmark's
        return str(result)
