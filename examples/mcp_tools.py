"""An agent on a local model that uses the tools of an MCP server, here a process of its own on this machine.

pip install "dlite-agent[mcp]"
python examples/mcp_tools.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.tools import BaseTool
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_mcp_adapters.sessions import StdioConnection
from langchain_mcp_adapters.tools import load_mcp_tools

from dlite_agent import ChatDLite

QUESTION = "How many lamps are in stock? Use the tool."
SERVER = Path(__file__).with_name("warehouse_server.py")


@asynccontextmanager
async def warehouse_tools() -> AsyncIterator[list[BaseTool]]:
    """Start the server and yield its tools; both end with the block."""
    connection = StdioConnection(transport="stdio", command=sys.executable, args=[str(SERVER)])
    async with MultiServerMCPClient({"warehouse": connection}).session("warehouse") as session:
        yield await load_mcp_tools(session)


async def ask(model: ChatDLite, question: str = QUESTION, middleware: Sequence[Any] = ()) -> list[AnyMessage]:
    """Return the messages of a conversation in which the agent may use the server's tools."""
    async with warehouse_tools() as tools:
        agent: Any = create_agent(model, tools, middleware=middleware)
        result = await agent.ainvoke({"messages": [HumanMessage(question)]})
    return list(result["messages"])


def main(model: str = "qwen2.5-coder-1.5b") -> None:
    for message in asyncio.run(ask(ChatDLite(model=model, max_tokens=200))):
        message.pretty_print()


if __name__ == "__main__":
    main(*sys.argv[1:])
