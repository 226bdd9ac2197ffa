"""An MCP server with two tools on standard input and output; `mcp_tools.py` starts it."""

from __future__ import annotations

from typing import Literal

from mcp.server.fastmcp import FastMCP

Item = Literal["lamp", "chair"]
"""In the tools' schemas, so that a held model can write nothing else."""

server = FastMCP("warehouse", log_level="WARNING")
stock: dict[Item, int] = {"lamp": 7, "chair": 2}


@server.tool()
def in_stock(item: Item) -> str:
    """Say how many of an item are in stock."""
    return f"{stock[item]} in stock"


@server.tool()
def reserve(item: Item, count: int) -> str:
    """Set some of an item aside."""
    if not 0 < count <= stock[item]:
        raise ValueError(f"cannot reserve {count} of {item}; there are {stock[item]}")
    stock[item] -= count
    return f"reserved {count}, {stock[item]} left"


if __name__ == "__main__":
    server.run("stdio")
