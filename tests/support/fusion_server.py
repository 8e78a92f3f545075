"""Stand-in for a SandboxFusion server: `/run_jupyter` with real notebook kernels, in its formats.

Requests, answers and the driver's steps are those of sandbox/server/sandbox_api.py and
runtime/jupyter/main.py of SandboxFusion at 469de08. It isolates nothing.
"""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jupyter_client.manager import AsyncKernelManager


async def run_cells(cells: list[str], folder: str) -> list[dict[str, Any]]:
    """Run cells in a new kernel, one after another; also those after an error."""
    manager = AsyncKernelManager(kernel_name="python3")
    await manager.start_kernel(cwd=folder)
    client = manager.client()
    results = []
    try:
        client.start_channels()
        await client.wait_for_ready()
        for cell in cells:
            result: dict[str, Any] = {"stdout": "", "stderr": "", "display": [], "error": []}

            def hook(message: dict[str, Any], result: dict[str, Any] = result) -> None:
                kind = message["header"]["msg_type"]
                content = message["content"]
                if kind == "stream":
                    result[content["name"]] += content["text"]
                elif kind in ("display_data", "execute_result"):
                    result["display"].append(content["data"])
                elif kind == "error":
                    result["error"].append(content)

            await client.execute_interactive(cell, output_hook=hook)
            results.append(result)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
    return results


def run_jupyter(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request."""
    answer: dict[str, Any] = {
        "status": "Success",
        "message": "",
        "executor_pod_name": None,
        "cells": [],
    }
    files = {}
    driver = {"status": "Finished", "return_code": 0, "stdout": "", "stderr": ""}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in request["files"].items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content))
        Path(folder, "main.py").touch()  # the server copies its driver there
        work = asyncio.wait_for(run_cells(request["cells"], folder), request["total_timeout"] + 10)
        try:
            answer["cells"] = asyncio.run(work)
            for name in request["fetch_files"]:
                if Path(folder, name).is_file():
                    files[name] = base64.b64encode(Path(folder, name).read_bytes()).decode()
        except TimeoutError:
            answer["status"] = "Failed"
            driver |= {"status": "TimeLimitExceeded", "return_code": None}
    return {
        **answer,
        "driver": {**driver, "execution_time": time.monotonic() - began},
        "files": files,
    }


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = json.dumps(run_jupyter(request)).encode()
        self.send_response(200 if self.path == "/run_jupyter" else 404)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def fusion_server() -> Iterator[str]:
    """Yield the address of a server that runs for this block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
