"""The tools an agent gets: files of one workspace, a calculator, a clock.

Each module has a factory of LangChain tools. A tool's docstring and argument descriptions are the prompt a
small model reads, so they are short and plain. Results are compact and the same for the same state; a
`ToolException` comes back to the model as a tool message with status "error", in one line.
"""

from __future__ import annotations

from pathlib import Path

from langchain_core.tools import BaseTool

from dlite_agent.tools.calculator import calculator_tool
from dlite_agent.tools.clock import clock_tool
from dlite_agent.tools.files import Workspace, file_tools

__all__ = ["Workspace", "calculator_tool", "clock_tool", "default_tools", "file_tools"]


def default_tools(workspace: Path) -> list[BaseTool]:
    """Return all tools, with file access confined to `workspace`.

    Args:
        workspace: Folder the file tools may use; created where it does not exist.

    Raises:
        ConfigError: `workspace` cannot be used as a folder.
    """
    return [*file_tools(workspace), calculator_tool(), clock_tool()]
