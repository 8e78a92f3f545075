#!/usr/bin/env python3
"""An interpreter of which only one thing is asked: to be SGLang's server, `-m sglang.launch_server ... --port N`.

Every completion is this process's number modulo 90. Prompt [13] ends the process if there is a file `die` in the
model's folder, which it takes away; prompt [14] is not answered for a long time.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

OPTIONS = dict(zip(sys.argv[3::1], sys.argv[4::1], strict=False))
STATE: dict[str, Any] = {"version": "default", "paused": 0, "calls": []}


def generate(body: dict[str, Any]) -> dict[str, Any]:
    if body["input_ids"] == [13] and (die := Path(OPTIONS["--model-path"]) / "die").exists():
        die.unlink()
        os._exit(1)
    if body["input_ids"] == [14]:
        time.sleep(60)
    count = body["sampling_params"]["max_new_tokens"]
    token = os.getpid() % 90
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5, token, None]] * count,
        "weight_version": STATE["version"],
    }
    return {"output_ids": [token] * count, "meta_info": meta}


def update(body: dict[str, Any]) -> dict[str, Any]:
    if not STATE["paused"]:
        return {"success": False, "message": "not paused"}
    if not list(Path(body["model_path"]).glob("*.safetensors")):
        return {"success": False, "message": "Failed to get weights iterator"}
    STATE["version"] = body["weight_version"]
    return {"success": True, "message": "Succeeded"}


def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
    STATE["calls"].append(path)
    if path == "/generate":
        return generate(body)
    if path == "/update_weights_from_disk":
        return update(body)
    if path in ("/pause_generation", "/continue_generation"):
        STATE["paused"] = path == "/pause_generation"
    return {"calls": STATE["calls"], "arguments": sys.argv[3:]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply({"paths": {"/generate": {}}})

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.reply(answer(self.path, json.loads(self.rfile.read(size) or b"{}") or {}))

    def reply(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(400 if body.get("success") is False else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    print("fake server", flush=True)
    ThreadingHTTPServer((OPTIONS["--host"], int(OPTIONS["--port"])), Handler).serve_forever()
