"""The arrows between the rooms of the house point one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dlite_agent"

FORBIDDEN = {
    "errors.py": ("dlite_agent", "torch", "langchain", "langgraph", "redis", "transformers"),
    "prompting": ("torch", "dlite_agent.engine", "dlite_agent.drafters", "dlite_agent.sessions", "redis"),
    "drafters": ("langchain", "langgraph", "redis", "dlite_agent.engine", "dlite_agent.sessions", "dlite_agent.agent"),
    "engine": ("langchain", "langgraph", "redis", "dlite_agent.sessions", "dlite_agent.prompting", "dlite_agent.agent"),
    "sessions": ("torch", "transformers", "dlite_agent.engine", "dlite_agent.drafters", "dlite_agent.prompting"),
    "tools": ("torch", "transformers", "dlite_agent.engine", "dlite_agent.sessions", "dlite_agent.prompting"),
    "constraints": ("torch", "langchain", "langgraph", "redis", "dlite_agent.sessions"),
    "lifetime.py": ("torch", "langchain", "langgraph", "redis", "transformers", "dlite_agent.engine"),
    "commit_queue.py": ("torch", "langchain", "langgraph", "redis", "transformers", "dlite_agent.engine"),
    "session_commands.py": (
        "torch",
        "transformers",
        "dlite_agent.engine",
        "dlite_agent.agent",
        "dlite_agent.chat_model",
    ),
    "live_session.py": ("langchain", "langgraph", "redis", "dlite_agent.prompting", "dlite_agent.agent"),
    "session_rows.py": ("langchain", "langgraph", "redis", "dlite_agent.prompting", "dlite_agent.agent"),
    "bitmask.py": ("dlite_agent", "torch", "langchain", "langgraph", "redis", "transformers"),
    "break_even.py": ("dlite_agent", "torch", "langchain", "langgraph", "redis", "transformers"),
    "session_keeper.py": ("langchain", "langgraph", "dlite_agent.prompting", "dlite_agent.agent"),
    "agent": (
        "torch",
        "redis",
        "dlite_agent.engine",
        "dlite_agent.drafters",
        "dlite_agent.sessions",
        "dlite_agent.run",
    ),
    "run": ("torch", "redis", "transformers", "dlite_agent.engine", "dlite_agent.drafters", "dlite_agent.cli"),
    "train": ("langgraph", "redis", "dlite_agent.sessions", "dlite_agent.agent"),
    "chat_model.py": ("dlite_agent.agent", "dlite_agent.demo", "dlite_agent.cli"),
}


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports when it runs; what only type checkers see is left out."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_imports_nothing_from_above(room: str) -> None:
    place = PACKAGE / room
    files = [place] if place.is_file() else sorted(place.glob("**/*.py"))
    assert files
    found = {
        (file.name, name)
        for file in files
        for name in imports(file)
        for forbidden in FORBIDDEN[room]
        if name == forbidden or name.startswith((f"{forbidden}.", f"{forbidden}_"))
    }
    if room == "prompting":  # LangChain's message types are translated in exactly one module
        found |= {(f.name, n) for f in files for n in imports(f) if "langchain" in n and f.name != "messages.py"}
    assert found == set()
