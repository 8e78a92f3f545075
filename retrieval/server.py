"""Command line of the retrieval server: `python -m retrieval.server --index DIR`."""

import argparse
import ctypes
import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import uvicorn

from retrieval.atomic_files import write_json_file
from retrieval.corpus import RetrievalError
from retrieval.regular_files import read_regular_text
from retrieval.wire import Ranking

if TYPE_CHECKING:
    from retrieval.batcher import Batcher
    from retrieval.searcher import Searcher

DRAIN_S = 10  # time that requests have to finish after a signal
MIN_TOKEN_CHARS = 16
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m retrieval.server", description=__doc__)
    add = parser.add_argument
    add("--index", type=Path, required=True, help="folder with an index.json")
    add("--host", default="127.0.0.1", help="address to listen on; a token is needed off loopback")
    add("--port", type=int, default=0, help="port to listen on; 0 takes any free port")
    add("--ready-file", type=Path, help="file that gets url and pid once requests are answered")
    add("--token-file", type=Path, help="file with a bearer token that clients must send")
    add("--encoder-folder", type=Path, help="Hugging Face folder, if not the packaged MiniLM")
    add("--ranking", choices=get_args(Ranking), default="dense", help="by vectors, words or both")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of encoder and flat index")
    add("--threads", type=int, default=1, help="CPU threads for encoding and for searching")
    add("--max-batch", type=int, default=64, help="queries that are searched together at most")
    add("--max-wait-ms", type=float, default=2.0, help="time that a query waits for a batch")
    add("--max-queue", type=int, default=4096, help="waiting queries before a 503")
    add("--max-connections", type=int, default=1024, help="open connections before a 503")
    add("--deadline-s", type=float, default=30.0, help="seconds of a request before a 503")
    add("--cache-mb", type=float, default=256.0, help="size of the cache of answers")
    add("--verify", action="store_true", help="compute all digests again, also of unchanged files")
    add(
        "--die-with-parent",
        type=int,
        metavar="PID",
        help="end when the process or thread that started this one ends; PID is its process id",
    )
    return parser.parse_args(argv)


def load_index(args: argparse.Namespace) -> tuple["Searcher", "Batcher"]:
    """Open the index and its encoder, check them, and set the thread counts of this process.

    Raises:
        RetrievalError: the index is damaged, or was built with another encoder.
    """
    # Imported here, so that a wrong option or a port in use is reported before torch is loaded.
    import faiss
    import torch
    from transformers.utils import logging as transformers_logging

    from retrieval.batcher import Batcher
    from retrieval.encoder import open_encoder
    from retrieval.index import Index, check_canary
    from retrieval.manifest import read_manifest
    from retrieval.searcher import Searcher

    torch.set_num_threads(args.threads)
    faiss.omp_set_num_threads(args.threads)
    # FAISS uses BLAS above this product of queries and dimensions. Its default of 128,000 suits
    # many threads; on one thread a batch of 64 queries takes twelve times as long without BLAS
    # (facebookresearch/faiss#5109).
    library: Any = faiss  # its type stubs lack cvar
    library.cvar.distance_compute_blas_threshold = 800 * args.threads
    transformers_logging.disable_progress_bar()

    identity = read_manifest(args.index).encoder
    encoder = None
    if identity is not None:
        encoder = open_encoder(identity, args.encoder_folder).to(args.device)
    index = Index.open(
        args.index,
        encoder=encoder.identity if encoder else None,
        verify=args.verify,
        device=args.device,
    )
    if encoder is not None:
        check_canary(index, encoder)

    searcher = Searcher(index, encoder, args.ranking)
    batcher = Batcher(
        searcher.encode,
        searcher.search,
        max_batch=args.max_batch,
        max_wait_s=args.max_wait_ms / 1000,
        max_queue=args.max_queue,
        cache_mb=args.cache_mb,
        deadline_s=args.deadline_s,
    )
    return searcher, batcher


def run_server(args: argparse.Namespace) -> None:
    """Load the index, listen, and answer until SIGTERM or SIGINT.

    Raises:
        RetrievalError: the server cannot start.
    """
    token = _read_token(args.host, args.token_file)
    listener = _listen(args.host, args.port)
    searcher, batcher = load_index(args)

    from retrieval.app import build_app

    def announce() -> None:
        url = _url_of(listener)
        print(f"serving {args.index} at {url}", flush=True)
        if args.ready_file is not None:
            write_json_file(args.ready_file, {"url": url, "pid": os.getpid()})

    app = build_app(searcher, batcher, token, on_startup=announce)
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=args.max_connections,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=DRAIN_S,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _read_token(host: str, token_file: Path | None) -> str | None:
    """Return the token in the file; None without a file, which is allowed on loopback only."""
    if token_file is not None:
        token = read_regular_text(token_file).strip()
        if len(token) < MIN_TOKEN_CHARS:
            raise RetrievalError(
                f"{token_file}: the token has {len(token)} characters, "
                f"expected at least {MIN_TOKEN_CHARS}"
            )
        return token
    try:
        on_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        on_loopback = host == "localhost"
    if not on_loopback:
        raise RetrievalError(
            f"host {host} is not a loopback address; listen on 127.0.0.1, or set --token-file"
        )
    return None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python repeats the address in brackets
        raise RetrievalError(
            f"cannot listen on {host}:{port} ({reason}); choose another --port"
        ) from None


def _url_of(listener: socket.socket) -> str:
    """Return the URL of a listener, with this machine's name if it listens on all addresses."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return f"http://{socket.getfqdn()}:{port}"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


def _die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent process ended before this one started")


def main(argv: list[str] | None = None) -> None:
    """Run the server; exit with 0 after a signal, and with 2 and one line if it cannot start."""
    args = parse_arguments(argv)
    if args.die_with_parent is not None:
        _die_with_parent(args.die_with_parent)
    # uvicorn handles these signals by draining, and raises them again afterwards. Then the process
    # ends at once: the interpreter would wait for a search that is still running.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    try:
        run_server(args)
    except (RetrievalError, OSError) as error:
        print(f"retrieval server: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
