"""The tools an agent gets: files of one workspace, a calculator, a clock; and more for who asks for them.

Each module has a factory of LangChain tools. A tool's docstring and argument descriptions are the prompt a
small model reads, so they are short and plain. Results are compact and the same for the same state; a
`ToolException` comes back to the model as a tool message with status "error". What may hang or grow runs in
a confined process (`process.py`, `confine.py`).
"""

from __future__ import annotations

from pathlib import Path

from langchain_core.tools import BaseTool

from dlite_agent.tools.calculator import calculator_tool
from dlite_agent.tools.clock import clock_tool
from dlite_agent.tools.database import database_tool
from dlite_agent.tools.file_tools import file_tools
from dlite_agent.tools.files import Workspace
from dlite_agent.tools.notes import note_tools
from dlite_agent.tools.process import Limits
from dlite_agent.tools.python import python_tool
from dlite_agent.tools.web import web_tool

__all__ = [
    "Limits",
    "Workspace",
    "calculator_tool",
    "clock_tool",
    "database_tool",
    "default_tools",
    "file_tools",
    "note_tools",
    "python_tool",
    "web_tool",
]


def default_tools(workspace: Path) -> list[BaseTool]:
    """Return the tools that need nothing but a folder, with file access confined to it.

    Args:
        workspace: Folder the file tools may use; created where it does not exist.

    Raises:
        ConfigError: `workspace` cannot be used as a folder.
    """
    return [*file_tools(workspace), calculator_tool(), clock_tool()]
