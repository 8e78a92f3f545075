#!/usr/bin/env python3
"""An interpreter of which only one thing is asked: to be SGLang's server, `-m sglang.launch_server ... --port N`.

Every token is this process's number. Prompt [13] ends the process if there is a file `die` in the
model's folder, which it takes away; prompt [14] is not answered for a long time. Where a file of settings names a
key, only who has it is answered.

With --enable-lora it holds adapters by name as SGLang 0.5.23 does (managers/tokenizer_control_mixin.py): one is refused
for its rank, its modules or DoRA; giving one up waits for its requests. Prompt [15] is answered after /free only.
"""

import base64
import json
import os
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

OPTIONS = dict(zip(sys.argv[3::1], sys.argv[4::1], strict=False))
KEY = Path(OPTIONS["--config"]).read_text().split('"')[1] if "--config" in OPTIONS else ""
STATE: dict[str, Any] = {
    "version": "default",
    "paused": 0,
    "calls": [],
    "aborted": [],
    "adapters": {},
    "asked": [],
}
FREE, UNDER_WAY = threading.Event(), Counter[str]()


def generate(body: dict[str, Any]) -> dict[str, Any]:
    adapter = body.get("lora_path", "")
    if adapter and adapter not in STATE["adapters"]:
        return {"error": {"message": f"Got LoRA adapter that has never been loaded: {adapter}"}}
    STATE["asked"].append(adapter)
    UNDER_WAY[adapter] += 1
    try:
        return generated(body)
    finally:
        UNDER_WAY[adapter] -= 1


def load_adapter(name: str, folder: Path) -> dict[str, Any]:
    told = json.loads((folder / "adapter_config.json").read_text())
    first = sys.argv.index("--lora-target-modules") + 1 if "--enable-lora" in sys.argv else 0
    if not first:
        return {
            "success": False,
            "error_message": "LoRA is not enabled. Please set `--enable-lora` to enable LoRA.",
        }
    known = set(" ".join(sys.argv[first:]).partition(" --")[0].split())
    if told.get("use_dora"):
        return {
            "success": False,
            "error_message": "LoRA serving currently doesn't support DoRA adapters",
        }
    if name in STATE["adapters"]:
        return {
            "success": False,
            "error_message": f"Failed to load LoRA adapter {name} because it is already loaded",
        }
    if told["r"] > int(OPTIONS["--max-lora-rank"]) or not set(told["target_modules"]) <= known:
        return {
            "success": False,
            "error_message": f"adapter {name} with rank {told['r']} is incompatible with the pool",
        }
    STATE["adapters"][name] = str(folder)
    return {"success": True, "loaded_adapters": STATE["adapters"]}


def unload_adapter(name: str) -> dict[str, Any]:
    if STATE["adapters"].pop(name, None) is None:
        return {"success": False, "error_message": f"LoRA with name {name} does not exist."}
    while UNDER_WAY[name]:
        time.sleep(0.01)
    return {"success": True}


def generated(body: dict[str, Any]) -> dict[str, Any]:
    if body["input_ids"] == [15]:
        FREE.wait(60)
    if body["input_ids"] == [13] and (die := Path(OPTIONS["--model-path"]) / "die").exists():
        die.unlink()
        os._exit(1)
    if body["input_ids"] == [14]:
        time.sleep(60)
    count = body["sampling_params"]["max_new_tokens"]
    token = os.getpid()
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5, token, None]] * count,
        "weight_version": STATE["version"],
    }
    return {"output_ids": [token] * count, "meta_info": meta | routed(body, count)}


def routed(body: dict[str, Any], count: int) -> dict[str, str]:
    """The experts of a prompt and `count` tokens, where they are asked for."""
    if not (body.get("return_routed_experts") and "--enable-return-routed-experts" in sys.argv):
        return {}
    told = json.loads((Path(OPTIONS["--model-path"]) / "config.json").read_text())
    each = list(range(told["num_experts_per_tok"])) * told["num_hidden_layers"]
    tokens = len(body["input_ids"]) + count - 1
    return {
        "routed_experts": base64.b64encode(
            struct.pack(f"<{tokens * len(each)}i", *each * tokens)
        ).decode()
    }


def events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """As the real server streams: all tokens so far, or the news where it was started so; until it is told to abort."""
    whole, sent, every = generate(body), 0, body["sampling_params"].get("stream_interval", 1)
    for known in range(1, len(whole["output_ids"]) + 1):
        time.sleep(0.02)
        ended = body["rid"] in STATE["aborted"]
        reason = {"type": "abort"} if ended else whole["meta_info"]["finish_reason"]
        meta = whole["meta_info"] | {
            "completion_tokens": known,
            "finish_reason": reason if ended or known == len(whole["output_ids"]) else None,
            "output_token_logprobs": whole["meta_info"]["output_token_logprobs"][sent:known],
            **routed(body, known),
        }
        if meta["finish_reason"] is None and known % every != 1 % every:
            continue
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
    print(f"version {STATE['version']} from {body['model_path']}", flush=True)
    return {"success": True, "message": "Succeeded"}


def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
    STATE["calls"].append(path)
    if path == "/generate":
        return generate(body)
    if path == "/free":
        FREE.set()
    if path == "/load_lora_adapter":
        return load_adapter(body["lora_name"], Path(body["lora_path"]))
    if path == "/unload_lora_adapter":
        return unload_adapter(body["lora_name"])
    if path == "/abort_request":
        STATE["aborted"].append(body["rid"])
    if path == "/update_weights_from_disk":
        return update(body)
    if path == "/update_weights_from_tensor":
        STATE["version"] = body["weight_version"]
    if path in ("/pause_generation", "/continue_generation"):
        STATE["paused"] = path == "/pause_generation"
    return {"arguments": sys.argv[3:]} | {
        name: STATE[name] for name in ("calls", "adapters", "asked")
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply({"paths": {"/generate": {}}})

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or b"{}") or {}
        if KEY and self.headers.get("Authorization") != f"Bearer {KEY}":
            self.send_error(401)
        elif body.get("stream"):
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
        self.send_response(400 if body.get("success") is False or "error" in body else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    print("fake server", flush=True)
    ThreadingHTTPServer((OPTIONS["--host"], int(OPTIONS["--port"])), Handler).serve_forever()
