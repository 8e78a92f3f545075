"""Property tests draw the same examples every time, and no example has a deadline on a busy machine."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sglang",
        help="interpreter of SGLang's environment, or the URL of a server, to test against",
    )
    parser.addoption(
        "--nodes",
        action="store_true",
        help="run the trainings on several nodes (`make test-nodes`)",
    )
    parser.addoption(
        "--mlflow", help="test MLflow's pages, and put their pictures into this folder"
    )
    parser.addoption(
        "--documents", action="store_true", help="run also the documents' commands that take longer"
    )
    parser.addoption("--slurm", action="store_true", help="run what takes minutes on a real Slurm")


def pytest_configure(config: pytest.Config) -> None:
    """Only `-m gpu` sees a GPU: the other tests start ranks, of which NCCL takes no two on one GPU.

    Triton reads its variable as it is imported, which many a library does; without a GPU it interprets its kernels.
    """
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # what a shell puts in the background ignores it
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """A million objects of modules stay as long as the process: no collection of garbage looks at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first: processes that take file by file (`make test`) then end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="module")
def running_ray() -> Iterator[None]:
    """Ray for the tests of one module; none is left up for the next."""
    from mcore_mas.runtime import local_ray

    with local_ray.running_ray(2, 100):
        yield


@pytest.fixture(scope="module")
def forked_programs() -> Iterator[None]:
    """What the tests of one module run as `python -m` or `-c` starts as a fork, which need not import torch first."""
    import subprocess
    import sys

    from tests.support.starts import Forked

    Forked(
        [sys.executable, "-c", ""]
    ).wait()  # what takes seconds in the first start counts in no test
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Forked)
        yield


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Process groups of this process alone, as every trainer needs them."""
    from mcore_mas.megatron.spec import destroy_process_groups, init_process_groups

    init_process_groups(rank=0, threads=1)
    yield
    destroy_process_groups()


@pytest.fixture
def mlflow_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """MLflow's real server, which has not started."""
    from tests.support.mlflow_server import served

    yield from served(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def slurm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A real Slurm of two pretended machines; without Debian's packages, and without --slurm, the test is skipped."""
    from tests.slurm.cluster import Slurm
    from tests.support.debian import NoPackages

    try:
        with Slurm(folder=tmp_path_factory.mktemp("slurm")) as cluster:
            yield cluster
    except NoPackages as error:
        if request.config.getoption("--slurm"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def sglang(request: pytest.FixtureRequest) -> str:
    """What --sglang names; without it the test is skipped."""
    given = request.config.getoption("--sglang")
    if not given:
        pytest.skip("needs --sglang; `make test-sglang` sets it up")
    return str(given)


@pytest.fixture(scope="session")
def sglang_engine(sglang: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One engine with one server of the tiny model, for all tests: starting it takes a minute on a CPU."""
    from tests.support.sglang_server import make_engine
    from tests.support.tiny import make_model

    folder = tmp_path_factory.mktemp("sglang")
    make_model(0).save_pretrained(folder / "model")
    engine = make_engine(sglang, folder / "model", folder, restarts=2)
    yield engine
    engine.close()


@pytest.fixture
def shared_by_name() -> Iterator[None]:
    """CPU memory goes to an unrelated process by name; a GPU's goes by handle, whatever this says."""
    import torch.multiprocessing

    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)
