"""Tools as OpenAI-style dicts: LangChain's conversion, and what it would lose of a schema.

It drops a JSON schema whose root lists no properties, and puts "anything" where a definition contains itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool, create_schema_from_function
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from dlite_agent.errors import ConfigError
from dlite_agent.prompting.schemas import references

Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool

_CHOICES = ("auto", "none", "any", "required")
_OWN_KEYS = ("title", "description")


def format_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools as OpenAI-style dicts.

    Args:
        tools: Functions, pydantic classes, TypedDicts, LangChain tools, OpenAI-style dicts, or JSON schemas with a
            title.

    Raises:
        ConfigError: Something is no tool, takes no object, cannot be written as JSON, or has a name that `tool_choice`
            gives a meaning.
    """
    return [_format(index, tool) for index, tool in enumerate(tools)]


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the tools of one call.

    Raises:
        ConfigError: Two have the same.
    """
    names: list[str] = [tool["function"]["name"] for tool in tools]
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(f"two tools are named {name!r}; give each a name of its own")
    return names


def _format(index: int, tool: Tool) -> dict[str, Any]:
    try:
        formatted: dict[str, Any] = convert_to_openai_tool(tool)
        function = formatted.get("function") or {}
        parameters = _whole_parameters(tool, function)
        if parameters is not None:
            formatted = {**formatted, "function": {**function, "parameters": parameters}}
        json.dumps(formatted, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"tool {index} is {tool!r}, which is none ({error})") from error
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ConfigError(f"tool {index} is {tool!r}; expected a function with a name")
    if function["name"] in _CHOICES:
        raise ConfigError(f"tool {index} is named {function['name']!r}, which is a tool_choice; rename it")
    kind = (formatted["function"].get("parameters") or {}).get("type", "object")
    if kind != "object":
        raise ConfigError(
            f"the arguments of tool {function['name']} have type {kind!r}; expected an object, for example one "
            "with that as its only property"
        )
    return formatted


def _whole_parameters(tool: Tool, function: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema of a tool's arguments where the conversion lost part of it."""
    if isinstance(tool, dict):
        is_lost = "title" in tool and "parameters" not in function
        return {key: value for key, value in tool.items() if key not in _OWN_KEYS} if is_lost else None
    arguments = _arguments_class(tool)
    if arguments is None:
        return None
    schema: dict[str, Any] = arguments.model_json_schema()
    if not _contains_itself(schema.get("$defs", {})):
        return None
    whole: dict[str, Any] = _without_titles(schema)
    return {key: value for key, value in whole.items() if key != "description"}


def _arguments_class(tool: Any) -> Any:
    """Return the pydantic class of a tool's arguments, or None where there is none."""
    if isinstance(tool, BaseTool):
        tool = tool.tool_call_schema
    elif callable(tool) and not isinstance(tool, type):
        name = getattr(tool, "__name__", "tool")
        tool = create_schema_from_function(name, tool, filter_args=(), parse_docstring=False, include_injected=False)
    is_class = isinstance(tool, type) and is_basemodel_subclass(tool)
    return tool if is_class and hasattr(tool, "model_json_schema") else None


def _contains_itself(definitions: Mapping[str, Any]) -> bool:
    """Whether a definition refers to itself, directly or through others."""
    uses = {name: {ref.rpartition("/")[2] for ref in references(part)} for name, part in definitions.items()}

    def is_reached(start: str) -> bool:
        seen: set[str] = set()
        left = [start]
        while left:
            for name in uses.get(left.pop(), ()):
                if name == start:
                    return True
                if name not in seen:
                    seen.add(name)
                    left.append(name)
        return False

    return any(map(is_reached, definitions))


def _without_titles(part: Any, *, names: bool = False) -> Any:
    """Return a schema without the titles that pydantic makes of names; `names`: the keys are names, not keywords."""
    if isinstance(part, list):
        return [_without_titles(inner) for inner in part]
    if not isinstance(part, Mapping):
        return part
    return {
        key: _without_titles(inner, names=not names and key in ("properties", "$defs"))
        for key, inner in part.items()
        if names or key != "title" or not isinstance(inner, str)
    }
