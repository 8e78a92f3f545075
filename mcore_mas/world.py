"""The environments of a run, with the retriever they ask running for as long as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from mcore_mas.config import RunConfig
from retrieval.client import RetrievalClient, RetrieverSidecar
from rollout.build import build_env
from rollout.envs.protocol import Env
from rollout.records import Task


@contextmanager
def world(config: RunConfig, log: str) -> Iterator[Callable[[Task], Env]]:
    """A maker of the run's environments; a retriever of its own logs to `log`.log in the run folder.

    Raises:
        RetrievalError: the retriever does not start.
    """
    if config.retriever is None:
        yield build_env(config.env)
        return
    server = (
        nullcontext(config.retriever.url)
        if config.retriever.url
        else RetrieverSidecar(
            config.folder / "index", log_path=config.folder / f"{log}.log", threads=config.retriever.threads
        )
    )
    with server as url:
        yield build_env(config.env, retriever=RetrievalClient(url))
