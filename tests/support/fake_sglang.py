#!/usr/bin/env python3
"""An interpreter of which only one thing is asked: to be SGLang's server, `-m sglang.launch_server ... --port N`.

Every completion is this process's number modulo 90. Prompt [13] ends the process if there is a file `die` in the
model's folder, which it takes away; prompt [14] is not answered for a long time.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

OPTIONS = dict(zip(sys.argv[3::1], sys.argv[4::1], strict=False))
STATE: dict[str, Any] = {"version": "default", "paused": 0, "calls": [], "aborted": []}


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


def events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """As the real server streams: all tokens so far, or the news where it was started so; until it is told to abort."""
    whole, sent = generate(body), 0
    for known in range(1, len(whole["output_ids"]) + 1):
        time.sleep(0.02)
        ended = body["rid"] in STATE["aborted"]
        reason = {"type": "abort"} if ended else whole["meta_info"]["finish_reason"]
        meta = whole["meta_info"] | {
            "completion_tokens": known,
            "finish_reason": reason if ended or known == len(whole["output_ids"]) else None,
            "output_token_logprobs": whole["meta_info"]["output_token_logprobs"][sent:known],
        }
        yield {"output_ids": whole["output_ids"][sent:known], "meta_info": meta}
        if ended:
            return
        sent = known if "--incremental-streaming-output" in sys.argv else 0


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
    if path == "/abort_request":
        STATE["aborted"].append(body["rid"])
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
        body = json.loads(self.rfile.read(size) or b"{}") or {}
        if body.get("stream"):
            self.stream(body)
        else:
            self.reply(answer(self.path, body))

    def stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events(body):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

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
