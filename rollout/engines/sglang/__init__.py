"""SGLang behind the engine's border: servers in an environment of their own, reached over HTTP.

- `engine`   `SGLangEngine`: generation, routing to replicas, updates of weights, sleep
- `settings` what it is told once, checked
- `fleet`    its servers: called, and started again when they die;  `replica`: one of them, ours or not
- `checks`   what they hold, against what the trainer sent
- `body`     what a request says, and what the answer means
- `server`   one server process: its command, its end with ours, what its log says last
- `client`   one server's HTTP API: deadlines, retries, what its answers mean
"""

from __future__ import annotations

SGLANG_VERSION = "0.5.23"  # what requirements/sglang.txt pins and `make test-sglang` runs
