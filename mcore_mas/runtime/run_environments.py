"""Environments of a run, with the retriever that they search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mcore_mas.config.run import RunConfig
from mcore_mas.planning.machine import visible_gpu_ids
from retrieval.client import RetrievalClient
from retrieval.sidecar import RetrieverSidecar
from rollout.base.processes import raise_open_file_limit
from rollout.base.restarts import Restarts
from rollout.config.environment import build_env
from rollout.config.retriever import RetrieverConfig
from rollout.engines.remote.keys import hide_key
from rollout.environments.protocol import Env
from rollout.records.trajectory import Task

RETRIEVER_RESTARTS = 3  # per hour, of a run's server that died or hangs


@contextmanager
def open_environments(config: RunConfig, log: str) -> Iterator[Callable[[Task], Env]]:
    """Yield a function that makes an environment for a task; a retriever runs for this block.

    First, the keys of all remote models are taken out of the environment variables, even if this
    process does not use them, so that no child process inherits them.

    Args:
        log: path of the retriever's log in the run folder, without its suffix.

    Raises:
        RetrievalError: the retriever does not start.
    """
    raise_open_file_limit()
    for remote in config.remotes.values():
        hide_key(remote.key_variable)
    if config.coach is not None:
        hide_key(config.coach.key_variable)
    if config.retriever is None:
        yield build_env(config.env)
        return

    retriever = config.retriever
    with ExitStack() as stack:
        urls = retriever.urls
        revive = None
        if not retriever.elsewhere:
            index_dir = retriever.folder or config.folder / "index"
            sidecar = make_sidecar(retriever, index_dir, config.folder / f"{log}.log")
            urls = (stack.enter_context(sidecar),)
            revive = sidecar.revive
        client = RetrievalClient(
            *urls,
            timeout_s=retriever.timeout_s,
            patience_s=retriever.patience_s,
            token_file=retriever.key_file,
            revive=revive,
        )
        yield build_env(config.env, retriever=client)


def make_sidecar(
    retriever: RetrieverConfig, index_dir: Path, log: Path | None = None
) -> RetrieverSidecar:
    """Return the retrieval server of a run, which is not started yet.

    It gets the last GPU of the machine if the retriever uses one (`RetrieverConfig.gpus` is 0 or 1).
    """
    return RetrieverSidecar(
        index_dir,
        log_path=log,
        python=retriever.python,
        encoder_folder=retriever.encoder_folder,
        gpus=visible_gpu_ids()[-retriever.gpus :] if retriever.gpus else (),
        extra_args=(
            "--threads",
            str(retriever.threads),
            "--ranking",
            retriever.ranking,
            "--device",
            retriever.device,
            "--deadline-s",
            str(retriever.timeout_s),
        ),
        may_restart=Restarts("retriever", RETRIEVER_RESTARTS).take,
    )
