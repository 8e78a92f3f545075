"""The environments of a run, with the retriever they ask running for as long as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from mcore_mas.config import RunConfig
from retrieval.client import RetrievalClient, RetrieverSidecar
from rollout.build import build_env
from rollout.envs.protocol import Env
from rollout.records import Task
from rollout.remote.key import hide


@contextmanager
def world(config: RunConfig, log: str) -> Iterator[Callable[[Task], Env]]:
    """A maker of the run's environments; a retriever of its own logs to `log`.log in the run folder.

    The run's keys leave the environment first, also where only training would use them.

    Raises:
        RetrievalError: the retriever does not start.
    """
    for model in (*config.remotes.values(), *([config.coach] if config.coach else ())):
        hide(model.key_variable)
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
        client = RetrievalClient(url, token_file=config.retriever.key_file)
        yield build_env(config.env, retriever=client)
