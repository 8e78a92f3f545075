"""Retrieval server: `python -m retrieval.server --index DIR --ready-file PATH`."""

import argparse
import contextlib
import ipaddress
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import get_args

import uvicorn

from retrieval.corpus import RetrievalError
from retrieval.wire import Ranking
from rollout.base.files import write_json
from rollout.base.http import is_loopback
from rollout.base.http_server import bind, server_config, token_of, url_of
from rollout.base.processes import die_with_parent

DRAIN_S = 10
BEAT_TICKS = 50  # of 0.1 s between two heartbeats


class ReadyServer(uvicorn.Server):
    """A uvicorn server that writes a file when it is listening, and touches it as long as it lives."""

    def __init__(
        self, config: uvicorn.Config, ready_file: Path | None, said: dict[str, object]
    ) -> None:
        super().__init__(config)
        self._ready_file, self._said = ready_file, said

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second from when it listens: the heartbeat, which writes a file anew that was removed."""
        if counter % BEAT_TICKS == 0 and self._ready_file:
            with contextlib.suppress(
                OSError
            ):  # its file system may be away for a while: no reason to end
                if counter and self._ready_file.exists():
                    os.utime(self._ready_file)
                else:
                    write_json(self._ready_file, self._said)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, and end the process there: it would wait for a search under way, however long that takes."""
        await super().shutdown(sockets=sockets)
        if self._ready_file:
            with contextlib.suppress(OSError):
                self._ready_file.unlink()
        os._exit(0)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m retrieval.server", description=__doc__)
    parser.add_argument("--index", type=Path, required=True, help="folder with an index.json")
    parser.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0 for clients on other machines, with a token"
    )
    parser.add_argument("--port", type=int, default=0, help="0: any free port, see --ready-file")
    parser.add_argument(
        "--ready-file", type=Path, help="gets url, host, pid, token once requests are answered"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads for encoding and search"
    )
    parser.add_argument(
        "--encoder-folder", type=Path, help="local Hugging Face folder, if not the packaged MiniLM"
    )
    parser.add_argument(
        "--token-file", type=Path, help="bearer token; not on loopback it is needed, or made"
    )
    parser.add_argument(
        "--max-batch", type=int, default=64, help="queries searched together, at most"
    )
    parser.add_argument(
        "--max-wait-ms", type=float, default=2.0, help="how long a query waits for company"
    )
    parser.add_argument(
        "--max-queue", type=int, default=4096, help="waiting queries beyond which requests get 503"
    )
    parser.add_argument(
        "--deadline-s", type=float, default=30.0, help="after which a request gets 503"
    )
    parser.add_argument(
        "--ranking", choices=get_args(Ranking), default="dense", help="by vectors, words, or both"
    )
    parser.add_argument(
        "--backend", choices=("faiss", "torch"), default="faiss", help="what scans a flat index"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of the encoder and the scan"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read all files again, also those seen unchanged"
    )
    parser.add_argument(
        "--cache-mb", type=float, default=256.0, help="of answers that are remembered"
    )
    parser.add_argument(
        "--die-with-parent",
        type=int,
        nargs="?",
        const=0,
        metavar="PID",
        help="end when the parent (of this pid) does",
    )
    return parser.parse_args(argv)


def run_server(args: argparse.Namespace) -> None:
    """Loads, checks, listens and answers until SIGTERM or SIGINT; raises RetrievalError if it cannot start."""
    try:
        token = (
            token_of(args.host, args.token_file) if args.token_file or not args.ready_file else None
        )
        if token is None and not is_loopback(
            args.host
        ):  # the file says it to those who may read it
            token = secrets.token_urlsafe(32)
    except ValueError as error:
        raise RetrievalError(str(error)) from None
    try:
        listener = bind(args.host, args.port)
    except OSError as error:
        raise RetrievalError(
            f"cannot listen on {args.host}:{args.port} ({error.strerror}); try --port 0"
        ) from None
    # Imported here: a wrong flag or a taken port is reported before seconds of importing torch.
    from retrieval.app import load_app

    app = load_app(args, token)
    said = {"url": _url(listener), "host": socket.getfqdn(), "pid": os.getpid(), "token": token}
    config = server_config(app, drain_s=DRAIN_S, lifespan=True)
    ReadyServer(config, args.ready_file, said).run(sockets=[listener])


def _url(listener: socket.socket) -> str:
    """Where clients ask, by this machine's name if it listens everywhere."""
    host, port = listener.getsockname()[:2]
    return (
        f"http://{socket.getfqdn()}:{port}"
        if ipaddress.ip_address(host).is_unspecified
        else url_of(listener)
    )


def main(argv: list[str] | None = None) -> None:
    """The command line: exit code 0 after a signal, 2 with one line on standard error if it cannot start."""
    args = parse_arguments(argv)
    os.umask(0o077)  # the ready file holds a token
    # uvicorn drains on these signals, then raises them again for whoever had them before: exit with 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    if args.die_with_parent is not None:
        die_with_parent(signal.SIGKILL, args.die_with_parent)
    try:
        run_server(args)
    except (RetrievalError, OSError) as error:
        print(f"retrieval server: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
