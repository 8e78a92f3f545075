"""Fake Hugging Face Hub on the loopback interface, and a fake host of GitHub's raw files.

It answers the requests for a repository's listing and for its files, whole or by range.
"""

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
    """Repositories of the hub, and the faults of their files.

    Attributes:
        repositories: content of files by name, by `datasets/owner/name` or `owner/name`.
        gated: repositories whose files need a token; their listings do not.
        cut: bytes of a file that arrive in the first download. The second one gets status 503, and
            later ones get the whole file.
        swapped: files whose last byte differs from the digest in the listing.
        requests: path and Range header of every request.
        tokens_elsewhere: Authorization headers that were sent to other hosts than the hub.
        raw: content of GitHub's files, by owner/name/revision/path.
        loops: paths, by their beginnings, that redirect to themselves.
        listing: bytes that the hub answers in place of each listing, if not None.
        url: URL of the running hub.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    swapped: set[str] = field(default_factory=set)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    tokens_elsewhere: set[str] = field(default_factory=set)
    raw: dict[str, bytes] = field(default_factory=dict)
    loops: tuple[str, ...] = ()
    listing: bytes | None = None
    url: str = ""


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """Run the hub's server for this block."""
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

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.startswith("cdn/"):
            assert self.headers["Host"].startswith("localhost:")
            self._note_token()
            name, _, file = path.removeprefix("cdn/").partition("@")
            self._send_file(name, file)
            return

        self.hub.requests.append((path, self.headers.get("Range")))
        if path.startswith(self.hub.loops):
            self._send(302, headers={"Location": f"{self.hub.url}{self.path}"})
            return
        if path in self.hub.raw:
            self._note_token()
            self._send(200, self.hub.raw[path])
        elif path.startswith("api/") and self.hub.listing is not None:
            self._send(200, self.hub.listing, {"Content-Type": "application/json"})
        elif path.startswith("api/"):
            self._answer_listing(path.removeprefix("api/").removeprefix("models/"))
        else:
            self._answer_file(path)

    def _note_token(self) -> None:
        token = self.headers.get("Authorization")
        if token is not None:
            self.hub.tokens_elsewhere.add(token)

    def _answer_listing(self, path: str) -> None:
        # huggingface_hub asks for the tree of a repository; the product asks for a revision.
        is_tree = "/tree/" in path
        name, _, rest = path.partition("/tree/" if is_tree else "/revision/")
        revision = rest.partition("/")[0]
        if name not in self.hub.repositories:
            self._send(401, headers={"X-Error-Code": "RepoNotFound"})
        elif not _revision_exists(revision):
            self._send(404, headers={"X-Error-Code": "RevisionNotFound"})
        elif is_tree:
            entries = [
                {
                    "type": "file",
                    "path": entry["rfilename"],
                    "size": entry["size"],
                    "oid": entry["blobId"],
                }
                for entry in self._siblings(name)
            ]
            self._send_json(entries)
        else:
            listing = {
                "id": name.removeprefix("datasets/"),
                "sha": COMMIT,
                "private": False,
                "siblings": self._siblings(name),
            }
            self._send_json(listing)

    def _answer_file(self, path: str) -> None:
        name, _, rest = path.partition("/resolve/")
        revision, _, file = rest.partition("/")
        if name not in self.hub.repositories:
            self._send(401)
        elif not _revision_exists(revision):
            self._send(404, headers={"X-Error-Code": "RevisionNotFound"})
        elif name in self.hub.gated and self.headers.get("Authorization") != "Bearer hf_good":
            self._send(403, headers={"X-Error-Code": "GatedRepo"})
        elif self.command == "HEAD":
            content = self.hub.repositories[name][file]
            digest = hashlib.sha256(content).hexdigest()
            self._send(200, content, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})
        elif _is_large(file):  # the hub redirects to another host
            host = self.hub.url.replace("127.0.0.1", "localhost")
            self._send(302, headers={"Location": f"{host}/cdn/{name}@{file}"})
        else:
            self._send_file(name, file)

    def _siblings(self, name: str) -> list[dict[str, object]]:
        """Return the entries of a repository's files."""
        siblings = []
        for file, content in self.hub.repositories[name].items():
            digest = hashlib.sha256(content).hexdigest()
            entry: dict[str, object] = {
                "rfilename": file,
                "size": len(content),
                "blobId": digest[:40],
            }
            if _is_large(file):
                entry["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 130}
            siblings.append(entry)
        return siblings

    def _send_file(self, name: str, file: str) -> None:
        """Send a file, from the start of the requested range, with the faults of `FakeHub`."""
        hub = self.hub
        if hub.cut.get(file) == 0:
            del hub.cut[file]
            self._send(503)
            return
        content = hub.repositories[name][file]
        if file in hub.swapped:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        sent_bytes = hub.cut.get(file)
        if start:
            content_range = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._send(206, content[start:], {"Content-Range": content_range}, sent_bytes)
        else:
            self._send(200, content, sent_bytes=sent_bytes)
        if file in hub.cut:
            hub.cut[file] = 0

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self,
        status: int,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        sent_bytes: int | None = None,
    ) -> None:
        """Send a response; close the connection after `sent_bytes` of the body, if not None."""
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent_bytes])
        if sent_bytes is not None:
            self.close_connection = True


def _revision_exists(revision: str) -> bool:
    return revision in ("", "main", COMMIT)


def _is_large(file: str) -> bool:
    """Return True if the hub stores a file with LFS; here, if its name has a dot."""
    return "." in file
