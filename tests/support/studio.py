"""A studio on a free port, for tests with a browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from mcore_mas.reports.studio import Studio
from mcore_mas.reports.studio_server import studio_app
from rollout.base.http_server import listener_url, open_listener, server_config


@contextmanager
def serve_studio(studio: Studio | Path, token: str | None = None) -> Iterator[str]:
    """Serve a studio, or that of a results folder, during the block; yield its URL."""
    if isinstance(studio, Path):
        studio = Studio(studio)
    listener = open_listener("127.0.0.1", 0)
    config = server_config(studio_app(studio, token), drain_s=1, lifespan=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener_url(listener)
    finally:
        server.should_exit = True
        thread.join()
