"""SGLang engine: servers in a Python environment of their own, reached over HTTP.

- `engine`    `SGLangEngine`: generation, routing to replicas, updates of weights, sleep
- `adapters`  engines of adapters, which are on the servers of one `SGLangEngine`
- `settings`  what it is told once, checked
- `fleet`     its servers: called, started again when they die, and checked against what the trainer sent
- `server`    one server process, ours or not: its command, its end with ours, what its log says last
- `client`    one server's HTTP API: request bodies, deadlines, retries, what its answers mean
"""

from __future__ import annotations

SGLANG_VERSION = "0.5.23"  # what requirements/sglang.txt pins and `make test-sglang` runs
