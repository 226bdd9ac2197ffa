"""The tools of an MCP server, a real process over standard input and output, in LangChain's agent; no network."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import ToolMessage

from dlite_agent import ChatDLite, Settings
from dlite_agent.runtime import close_all
from dlite_agent.testing import write_tiny_chat_model

pytest.importorskip("mcp.server.fastmcp", reason="needs the extra mcp", exc_type=ImportError)
pytest.importorskip("langchain_mcp_adapters.client", reason="needs the extra mcp", exc_type=ImportError)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "mcp_tools.py"
    spec = spec_from_file_location("mcp_tools", path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatDLite]:
    folder = write_tiny_chat_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    settings = Settings(home=tmp_path_factory.mktemp("home"), redis_url=None, threads=1, offline=True)
    yield ChatDLite(model=str(folder), settings=settings, max_tokens=16)
    close_all()


async def run(tools: list[Any], name: str, **arguments: Any) -> ToolMessage:
    (tool,) = (tool for tool in tools if tool.name == name)
    message = await tool.ainvoke({"type": "tool_call", "id": "1", "name": name, "args": arguments})
    assert isinstance(message, ToolMessage)
    return message


async def test_a_server_process_serves_its_tools_and_keeps_its_state(example: ModuleType) -> None:
    async with example.warehouse_tools() as tools:
        assert sorted(tool.name for tool in tools) == ["in_stock", "reserve"]
        assert "7 in stock" in (await run(tools, "in_stock", item="lamp")).text
        assert "reserved 3, 4 left" in (await run(tools, "reserve", item="lamp", count=3)).text
        assert "4 in stock" in (await run(tools, "in_stock", item="lamp")).text
        failed = await run(tools, "reserve", item="lamp", count=99)
        assert failed.status == "error"
        assert "cannot reserve 99 of lamp" in failed.text
    async with example.warehouse_tools() as tools:  # another process
        assert "7 in stock" in (await run(tools, "in_stock", item="lamp")).text


async def test_an_agent_on_random_weights_calls_the_server_and_answers(example: ModuleType, model: ChatDLite) -> None:
    @wrap_model_call
    async def call_first(request: Any, handler: Any) -> Any:
        has_result = isinstance(request.messages[-1], ToolMessage)
        settings = {"parallel_tool_calls": False, "max_tokens": 200}
        tools = [tool for tool in request.tools if tool.name == "in_stock"]
        choice = "none" if has_result else "any"
        return await handler(request.override(tools=tools, tool_choice=choice, model_settings=settings))

    messages = await example.ask(model, middleware=[call_first])
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[1].tool_calls[0]["name"] == "in_stock"
    assert messages[2].text in ("7 in stock", "2 in stock")
