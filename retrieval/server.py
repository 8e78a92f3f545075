"""Retrieval server: `python -m retrieval.server --index DIR --ready-file PATH`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import uvicorn

from retrieval.corpus import RetrievalError
from rollout.base.files import write_json
from rollout.base.http_server import bind, server_config, token_of, url_of
from rollout.base.processes import die_with_parent

DRAIN_S = 10


class ReadyServer(uvicorn.Server):
    """A uvicorn server that says when it is listening."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_listening()


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m retrieval.server", description=__doc__)
    parser.add_argument("--index", type=Path, required=True, help="folder with an index.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port, see --ready-file")
    parser.add_argument("--ready-file", type=Path, help='gets {"url", "pid"} once requests are answered')
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for encoding and search")
    parser.add_argument("--encoder-folder", type=Path, help="local Hugging Face folder, if not the packaged MiniLM")
    parser.add_argument("--token-file", type=Path, help="bearer token; required for a host that is not loopback")
    parser.add_argument("--max-batch", type=int, default=64, help="queries searched together")
    parser.add_argument("--max-wait-ms", type=float, default=2.0, help="how long a query waits for company")
    parser.add_argument("--max-queue", type=int, default=4096, help="waiting queries beyond which requests get 503")
    parser.add_argument("--cache-size", type=int, default=16384, help="answers remembered")
    parser.add_argument(
        "--die-with-parent", type=int, nargs="?", const=0, metavar="PID", help="end when the parent (of this pid) does"
    )
    return parser.parse_args(argv)


def run_server(args: argparse.Namespace) -> None:
    """Loads, checks, listens and answers until SIGTERM or SIGINT; raises RetrievalError if it cannot start."""
    try:
        token = token_of(args.host, args.token_file)
    except ValueError as error:
        raise RetrievalError(str(error)) from None
    try:
        listener = bind(args.host, args.port)
    except OSError as error:
        raise RetrievalError(f"cannot listen on {args.host}:{args.port} ({error.strerror}); try --port 0") from None
    # Imported here: a wrong flag or a taken port is reported before seconds of importing torch.
    from retrieval.app import load_app

    app = load_app(
        args.index,
        encoder_folder=args.encoder_folder,
        threads=args.threads,
        token=token,
        max_batch=args.max_batch,
        max_wait_s=args.max_wait_ms / 1000,
        max_queue=args.max_queue,
        cache_size=args.cache_size,
    )

    def announce() -> None:
        if args.ready_file:
            write_json(args.ready_file, {"url": url_of(listener), "pid": os.getpid()})

    config = server_config(app, drain_s=DRAIN_S, lifespan=True)
    try:
        ReadyServer(config, announce).run(sockets=[listener])
    finally:
        if args.ready_file:
            args.ready_file.unlink(missing_ok=True)


def _end(_signal: int, _frame: object) -> NoReturn:
    sys.exit(0)


def main(argv: list[str] | None = None) -> None:
    """The command line: exit code 0 after a signal, 2 with one line on standard error if it cannot start."""
    args = parse_arguments(argv)
    # uvicorn drains on these signals, then raises them again for whoever had them before: exit with 0.
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    if args.die_with_parent is not None:
        die_with_parent(signal.SIGKILL, args.die_with_parent)
    try:
        run_server(args)
    except (RetrievalError, OSError) as error:
        print(f"retrieval server: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
