"""Turning a function and its argument model into a tool whose failures are one line for the model."""

from __future__ import annotations

from collections.abc import Callable

from langchain_core.tools import BaseTool, StructuredTool
from pydantic import BaseModel, ValidationError
from pydantic.v1 import ValidationError as ValidationErrorV1


def make_tool(function: Callable[..., str], args: type[BaseModel]) -> BaseTool:
    """Return a tool named and described by `function`.

    Wrong arguments and `ToolException` become a `ToolMessage` with status "error" instead of an exception.
    """
    return StructuredTool.from_function(
        function, args_schema=args, handle_tool_error=True, handle_validation_error=_describe_validation
    )


def _describe_validation(error: ValidationError | ValidationErrorV1) -> str:
    problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    return f"wrong arguments: {'; '.join(problems)}"
