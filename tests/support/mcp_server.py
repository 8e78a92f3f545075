"""A small MCP server over standard input and output, by the official library."""

from __future__ import annotations

import os

from mcp.server.mcpserver import MCPServer

server = MCPServer("small")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def divide(a: int, b: int) -> str:
    """Divide two numbers."""
    return str(a // b)


@server.tool()
def pid() -> str:
    """Return the server's process id."""
    return str(os.getpid())


if __name__ == "__main__":
    server.run("stdio")
