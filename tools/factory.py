"""Turning a function and its argument model into a tool whose failures are one line for the model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from langchain_core.tools import BaseTool, StructuredTool
from pydantic import BaseModel, ValidationError
from pydantic.v1 import ValidationError as ValidationErrorV1

from dlite_agent.tools.process import STOP


def make_tool(function: Callable[..., str], args: type[BaseModel]) -> BaseTool:
    """Return a tool named and described by `function`, for synchronous and asynchronous callers.

    Wrong arguments and `ToolException` become a `ToolMessage` with status "error" instead of an exception. An
    asynchronous call runs in a thread; when it is cancelled, a process that `function` waits for is killed.
    """

    async def run_in_thread(**arguments: object) -> str:
        stop = threading.Event()
        token = STOP.set(stop)  # threads of asyncio inherit it
        try:
            return await asyncio.to_thread(function, **arguments)
        finally:
            stop.set()
            STOP.reset(token)

    return StructuredTool.from_function(
        function,
        coroutine=run_in_thread,
        args_schema=args,
        handle_tool_error=True,
        handle_validation_error=_describe_validation,
    )


def shorten(text: str, max_chars: int, advice: str) -> str:
    """Return a text of at most about `max_chars` characters: its beginning, what was left out, and its end.

    Args:
        text: Any text.
        max_chars: Most characters of it to keep.
        advice: How to see the rest.
    """
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n({len(text) - 2 * half} characters left out; {advice})\n{text[len(text) - half :]}"


def _describe_validation(error: ValidationError | ValidationErrorV1) -> str:
    problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    return f"wrong arguments: {'; '.join(problems)}"
