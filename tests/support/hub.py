"""A hub on the loopback: Hugging Face's routes for what a repository holds, and for its files, whole or by range."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0de"


@dataclass
class FakeHub:
    """Repositories by `datasets/owner/name` or `owner/name`, and what goes wrong with them."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)  # listed, but their files need a token
    cut: dict[str, int] = field(
        default_factory=dict
    )  # bytes of a file that arrive the first time; then 503, once
    swapped: set[str] = field(
        default_factory=set
    )  # files whose last byte is another than the listing's digest says
    asked: list[tuple[str, str | None]] = field(
        default_factory=list
    )  # (path, Range) of every request
    tokens_elsewhere: set[str] = field(
        default_factory=set
    )  # that were sent to the host of large files
    raw: dict[str, bytes] = field(
        default_factory=dict
    )  # files of GitHub by owner/name/revision/path
    url: str = ""


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path).strip("/")
        if path.startswith("cdn/"):
            assert self.headers["Host"].startswith("localhost:")
            hub.tokens_elsewhere |= {
                value for key, value in self.headers.items() if key == "Authorization"
            }
            self._file(*path.removeprefix("cdn/").split("@"))
            return
        hub.asked.append((path, self.headers.get("Range")))
        if path in hub.raw:
            hub.tokens_elsewhere |= {
                value for key, value in self.headers.items() if key == "Authorization"
            }
            self._answer(200, hub.raw[path], {})
            return
        listing = path.startswith("api/")
        name = path.removeprefix("api/").removeprefix("models/")
        tree = listing and "/tree/" in name  # of which huggingface_hub's own client asks
        name, _, rest = name.partition(
            "/tree/" if tree else "/revision/" if listing else "/resolve/"
        )
        revision, _, file = rest.partition("/")
        if name not in hub.repositories:
            self._answer(401, b"", {"X-Error-Code": "RepoNotFound"} if listing else {})
        elif revision not in ("", "main", COMMIT):
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif tree:
            listed = [
                {
                    "type": "file",
                    "path": one["rfilename"],
                    "size": one["size"],
                    "oid": one["blobId"],
                }
                for one in self._siblings(name)
            ]
            self._answer(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})
        elif listing:
            self._answer(
                200, json.dumps(self._listing(name)).encode(), {"Content-Type": "application/json"}
            )
        elif name in hub.gated and self.headers.get("Authorization") != "Bearer hf_good":
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif self.command == "HEAD":
            named = {
                "ETag": f'"{hashlib.sha256(hub.repositories[name][file]).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
            }
            self._answer(200, hub.repositories[name][file], named)
        elif "." in file:  # large files lie elsewhere, on a host of another name
            elsewhere = hub.url.replace("127.0.0.1", "localhost")
            self._answer(302, b"", {"Location": f"{elsewhere}/cdn/{name}@{file}"})
        else:
            self._file(name, file)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _listing(self, name: str) -> dict[str, object]:
        found = {"id": name.removeprefix("datasets/"), "sha": COMMIT, "private": False}
        return {**found, "siblings": self._siblings(name)}

    def _siblings(self, name: str) -> list[dict[str, object]]:
        siblings = []
        for file, content in self.hub.repositories[name].items():
            digest = hashlib.sha256(content).hexdigest()
            lfs = (
                {"lfs": {"size": len(content), "sha256": digest, "pointerSize": 130}}
                if "." in file
                else {}
            )
            siblings.append({"rfilename": file, "size": len(content), "blobId": digest[:40], **lfs})
        return siblings

    def _file(self, name: str, file: str) -> None:
        hub = self.hub
        content = hub.repositories[name][file]
        if file in hub.swapped:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if hub.cut.get(file) == 0:
            del hub.cut[file]
            self._answer(503, b"", {})
            return
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = (
            {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        )
        self._answer(206 if start else 200, content[start:], headers, hub.cut.get(file))
        if file in hub.cut:
            hub.cut[file] = 0

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        self.close_connection = self.close_connection or cut is not None
