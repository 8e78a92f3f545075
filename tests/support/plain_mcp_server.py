"""Minimal MCP server over standard input and output; it starts fast, as it imports no library."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

_NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
_SCHEMAS = {"add": _NUMBERS, "wait": {"type": "object"}, "crash": {"type": "object"}}


def call(name: str, arguments: dict[str, Any]) -> str:
    """Return the result of a tool."""
    if name == "crash":
        os._exit(3)
    if name == "wait":
        time.sleep(60)
    return str(arguments["a"] + arguments["b"])


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request; None if the method is unknown."""
    if method == "initialize":
        info = {"name": "plain", "version": "1"}
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": info,
        }
    if method == "tools/list":  # every page has one tool, and its cursor is that tool's number
        names = list(_SCHEMAS)
        number = int(params.get("cursor", 0))
        page: dict[str, Any] = {
            "tools": [{"name": names[number], "inputSchema": _SCHEMAS[names[number]]}]
        }
        if number + 1 < len(names):
            page["nextCursor"] = str(number + 1)
        return page
    if method == "tools/call":
        return {"content": [{"type": "text", "text": call(params["name"], params["arguments"])}]}
    return None


def main() -> None:
    """Answer requests until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        result = answer(request["method"], request.get("params", {}))
        response = {"jsonrpc": "2.0", "id": request["id"]}
        if result is None:
            response["error"] = {"code": -32601, "message": "Method not found"}
        else:
            response["result"] = result
        print(json.dumps(response), flush=True)


if __name__ == "__main__":
    main()
