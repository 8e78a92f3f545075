#!/usr/bin/env python3
"""Fake Python interpreter that can only run SGLang's server: `-m sglang.launch_server ... --port N`.

The server uses the standard library only, so that it starts fast. Every token of its replies is the
id of its process, so that tests see which server replied.

- Prompt [13] ends the process if the model's folder has a file `die`, and removes the file.
- A request to free memory does the same with a file `die_at_release`.
- Prompt [14] is answered after a minute.
- Prompt [15], and requests to score tokens that begin with 15, are answered after a request to /free.

Every token that a request scores has the log-probability -0.25.

If the file of settings (`--config`) names a key, requests need it.

With --enable-lora the server loads adapters by name as SGLang 0.5.23 does
(managers/tokenizer_control_mixin.py). It refuses adapters for their rank, their modules or DoRA.
Unloading an adapter waits for its requests.

It refuses requests with a grammar if it has no tokenizer, or another backend than llguidance.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

ARGUMENTS = sys.argv[3:]
OPTIONS = dict(pairwise(ARGUMENTS))  # each word with the next one
MODEL = Path(OPTIONS["--model-path"])
KEY = Path(OPTIONS["--config"]).read_text().split('"')[1] if "--config" in OPTIONS else ""
STATE: dict[str, Any] = {
    "version": "default",
    "paused": 0,
    "calls": [],  # paths of all requests
    "aborted": [],  # ids of aborted requests
    "adapters": {},  # folder by name
    "asked": [],  # adapter of each request for tokens
    "grammars": [],  # grammar of each request for tokens that has one
}
FREE = threading.Event()
RUNNING_REQUESTS = Counter[str]()  # by adapter


def lora_modules() -> set[str]:
    """Return the names of the modules in --lora-target-modules, which takes several words."""
    words = " ".join(ARGUMENTS).partition("--lora-target-modules ")[2]
    return set(words.partition(" --")[0].split())


def failure(message: str, field: str = "error_message") -> dict[str, Any]:
    return {"success": False, field: message}


def generate(body: dict[str, Any]) -> dict[str, Any]:
    adapter = body.get("lora_path", "")
    if adapter and adapter not in STATE["adapters"]:
        return {"error": {"message": f"Got LoRA adapter that has never been loaded: {adapter}"}}
    grammar = body["sampling_params"].get("ebnf")
    if grammar is not None:
        has_backend = OPTIONS.get("--grammar-backend") == "llguidance"
        if not has_backend or "--skip-tokenizer-init" in ARGUMENTS:
            return {"error": {"message": "Grammar-based generation is not supported"}}
        STATE["grammars"].append(grammar)
    STATE["asked"].append(adapter)
    RUNNING_REQUESTS[adapter] += 1
    try:
        return sample(body)
    finally:
        RUNNING_REQUESTS[adapter] -= 1


def load_adapter(name: str, folder: Path) -> dict[str, Any]:
    if "--enable-lora" not in ARGUMENTS:
        return failure("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
    config = json.loads((folder / "adapter_config.json").read_text())
    if config.get("use_dora"):
        return failure("LoRA serving currently doesn't support DoRA adapters")
    if name in STATE["adapters"]:
        return failure(f"Failed to load LoRA adapter {name} because it is already loaded")
    fits_rank = config["r"] <= int(OPTIONS["--max-lora-rank"])
    if not fits_rank or not set(config["target_modules"]) <= lora_modules():
        return failure(f"adapter {name} with rank {config['r']} is incompatible with the pool")
    STATE["adapters"][name] = str(folder)
    return {"success": True, "loaded_adapters": STATE["adapters"]}


def unload_adapter(name: str) -> dict[str, Any]:
    if STATE["adapters"].pop(name, None) is None:
        return failure(f"LoRA with name {name} does not exist.")
    while RUNNING_REQUESTS[name]:
        time.sleep(0.01)
    return {"success": True}


def die_if_ordered(name: str) -> None:
    """End the process if the model's folder has a file of this name, and remove the file."""
    order = MODEL / name
    if order.exists():
        order.unlink()
        os._exit(1)


def sample(body: dict[str, Any]) -> dict[str, Any]:
    """Return the whole reply to a request."""
    if body["input_ids"] == [13]:
        die_if_ordered("die")
    if body["input_ids"] == [14]:
        time.sleep(60)
    scores_tokens = "logprob_start_len" in body
    if body["input_ids"] == [15] or (scores_tokens and body["input_ids"][0] == 15):
        FREE.wait(60)
    count = body["sampling_params"]["max_new_tokens"]
    token = os.getpid()
    candidates = [[-0.5, token, None], [-1.5, 7, None], [-3.4e38, 8, None]]
    meta_info = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5, token, None]] * count,
        "output_top_logprobs": [candidates[: body.get("top_logprobs_num", 0)]] * count,
        "weight_version": STATE["version"],
        **scores(body),
        **routed_experts(body, count),
    }
    return {"output_ids": [token] * count, "meta_info": meta_info}


def scores(body: dict[str, Any]) -> dict[str, Any]:
    """Return the log-probabilities of the request's own tokens, if it wants them."""
    if "logprob_start_len" not in body:
        return {}
    first, *rest = body["input_ids"][body["logprob_start_len"] :]
    entries = [[None, first, None], *([-0.25, token, None] for token in rest)]
    return {"input_token_logprobs": entries}


def routed_experts(body: dict[str, Any], count: int) -> dict[str, str]:
    """Return the experts of the prompt and of `count` tokens, if the request wants them."""
    is_enabled = "--enable-return-routed-experts" in ARGUMENTS
    if not is_enabled or not body.get("return_routed_experts"):
        return {}
    config = json.loads((MODEL / "config.json").read_text())
    experts_of_token = list(range(config["num_experts_per_tok"])) * config["num_hidden_layers"]
    tokens = len(body["input_ids"]) + count - 1
    experts = experts_of_token * tokens
    packed = struct.pack(f"<{len(experts)}i", *experts)
    return {"routed_experts": base64.b64encode(packed).decode()}


def stream_events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield parts of a reply as SGLang does, until the request is aborted.

    A part has all tokens so far, or only the new ones with --incremental-streaming-output.
    """
    reply = generate(body)
    size = len(reply["output_ids"])
    logprobs = reply["meta_info"]["output_token_logprobs"]
    interval = body["sampling_params"].get("stream_interval", 1)
    sent = 0
    for sampled in range(1, size + 1):
        time.sleep(0.02)
        is_aborted = body["rid"] in STATE["aborted"]
        is_last = is_aborted or sampled == size
        if not is_last and sampled % interval != 1 % interval:
            continue

        finish_reason = None
        if is_aborted:
            finish_reason = {"type": "abort"}
        elif is_last:
            finish_reason = reply["meta_info"]["finish_reason"]
        meta_info = {
            **reply["meta_info"],
            "completion_tokens": sampled,
            "finish_reason": finish_reason,
            "output_token_logprobs": logprobs[sent:sampled],
            "output_top_logprobs": reply["meta_info"]["output_top_logprobs"][sent:sampled],
            **routed_experts(body, sampled),
        }
        yield {"output_ids": reply["output_ids"][sent:sampled], "meta_info": meta_info}
        if is_aborted:
            return
        if "--incremental-streaming-output" in ARGUMENTS:
            sent = sampled


def update_weights_from_disk(body: dict[str, Any]) -> dict[str, Any]:
    if not STATE["paused"]:
        return failure("not paused", "message")
    if not list(Path(body["model_path"]).glob("*.safetensors")):
        return failure("Failed to get weights iterator", "message")
    STATE["version"] = body["weight_version"]
    print(f"version {STATE['version']} from {body['model_path']}", flush=True)
    return {"success": True, "message": "Succeeded"}


def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the response to a request.

    Requests without a response of their own get the server's arguments and some of its state.
    """
    STATE["calls"].append(path)
    if path == "/generate":
        return generate(body)
    if path == "/free":
        FREE.set()
    if path == "/release_memory_occupation":
        die_if_ordered("die_at_release")
    if path == "/load_lora_adapter":
        return load_adapter(body["lora_name"], Path(body["lora_path"]))
    if path == "/unload_lora_adapter":
        return unload_adapter(body["lora_name"])
    if path == "/abort_request":
        STATE["aborted"].append(body["rid"])
    if path == "/update_weights_from_disk":
        return update_weights_from_disk(body)
    if path == "/update_weights_from_tensor":
        STATE["version"] = body["weight_version"]
    if path in ("/pause_generation", "/continue_generation"):
        STATE["paused"] = path == "/pause_generation"
    state = {name: STATE[name] for name in ("calls", "adapters", "asked", "grammars")}
    return {"arguments": ARGUMENTS, **state}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply({"paths": {"/generate": {}}})

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or b"{}") or {}
        if KEY and self.headers.get("Authorization") != f"Bearer {KEY}":
            self.send_error(401)
        elif body.get("stream"):
            self._stream(body)
        else:
            self._reply(answer(self.path, body))

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for event in stream_events(body):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _reply(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        is_error = body.get("success") is False or "error" in body
        self.send_response(400 if is_error else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    print("fake server", flush=True)
    ThreadingHTTPServer((OPTIONS["--host"], int(OPTIONS["--port"])), Handler).serve_forever()
