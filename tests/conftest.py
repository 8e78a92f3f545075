"""Options and fixtures of all tests."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Property tests draw the same examples every time. On a busy machine no example has a deadline.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


# Files of about half a minute and more
LONG_FILES = {
    "test_collected_steps.py",
    "test_credit_training.py",
    "test_dag.py",
    "test_evaluate.py",
    "test_every_experiment.py",
    "test_exactness.py",
    "test_failpoints.py",
    "test_full_disk.py",
    "test_gpu_budget.py",
    "test_gpu_kit.py",
    "test_gpu_kit_runs.py",
    "test_hidden_verdicts.py",
    "test_local_ray.py",
    "test_mlflow_down.py",
    "test_nodes.py",
    "test_notebooks.py",
    "test_own_folder.py",
    "test_paper_targets.py",
    "test_pipeline.py",
    "test_placement_training.py",
    "test_quickstart.py",
    "test_replicas.py",
    "test_retrieval_sidecar.py",
    "test_same_run.py",
    "test_sandbox_users.py",
    "test_shared_base.py",
    "test_shell_blocks.py",
    "test_signals.py",
    "test_slurm_profile.py",
    "test_slurm_ray.py",
    "test_teams_train.py",
    "test_trainer.py",
    "test_training.py",
    "test_transformer_engine.py",
    "test_tree_kernels.py",
    "test_whole_run.py",
}


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
        "--documents", action="store_true", help="run also the long commands of the documentation"
    )
    parser.addoption(
        "--slurm", action="store_true", help="run the tests that take minutes on a real Slurm"
    )
    parser.addoption(
        "--learning",
        action="store_true",
        help="run the trainings whose scores must rise (`make test-learning`)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs from all tests but those of `-m gpu`.

    The other tests start several ranks, and NCCL does not accept two ranks on one GPU. Without a GPU, Triton interprets
    its kernels. Its variable is set here, because Triton reads it at import, and many libraries import Triton.
    """
    # A shell lets its background jobs ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the objects of imported modules from garbage collections, which would visit a million of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without slow tests with `-m slow`; to import them takes each process ten seconds."""
    if config.option.markexpr != "slow" or not collection_path.name.startswith("test_"):
        return None
    has_slow_tests = "mark.slow" in collection_path.read_text(encoding="utf-8")
    return None if has_slow_tests else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files with slow tests first, and the longest of them before all, so that all processes end together."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow_files, item.path.name not in LONG_FILES))


@pytest.fixture
def measures_learning(request: pytest.FixtureRequest) -> None:
    """Skip a test, unless --learning is given, of the scores that a training reaches.

    Such scores depend on the processor's rounding.
    """
    if not request.config.getoption("--learning"):
        pytest.skip("trains for minutes; `make test-learning` runs it")


@pytest.fixture(scope="module")
def forked_ray_workers() -> Iterator[None]:
    """Start the workers of Ray as forks of a process that has imported their modules, for the tests of one module."""
    from tests.support import starts

    with starts.forked_ray_workers():
        yield


@pytest.fixture(scope="module")
def running_ray(forked_ray_workers: None) -> Iterator[None]:
    """Run Ray for the tests of one module."""
    from mcore_mas.runtime import local_ray

    with local_ray.running_ray(2, 100):
        yield


@pytest.fixture(scope="module")
def forked_programs() -> Iterator[None]:
    """Start `python -m` and `python -c` as forks of a process that has imported torch, for the tests of one module."""
    import subprocess
    import sys

    from tests.support.starts import Forked

    # The first start takes seconds, which are not part of a test's time here.
    Forked([sys.executable, "-c", ""]).wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Forked)
        yield


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Initialize the process groups of a trainer with one rank in this process."""
    from mcore_mas.megatron.spec import destroy_process_groups, init_process_groups

    init_process_groups(rank=0, threads=1)
    yield
    destroy_process_groups()


@pytest.fixture
def mlflow_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return MLflow's real server, which has not started."""
    from tests.support.mlflow_server import served

    yield from served(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def slurm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Return a real Slurm cluster of two nodes on this machine.

    If Debian's packages cannot be downloaded, the test is skipped, or fails with --slurm.
    """
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
    """Return the interpreter or the URL of --sglang; skip the test without this option."""
    server = request.config.getoption("--sglang")
    if not server:
        pytest.skip("needs --sglang; `make test-sglang` sets it up")
    return str(server)


@pytest.fixture(scope="session")
def sglang_engine(sglang: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return an engine with one server of the tiny model.

    All tests share it, because its start takes a minute on a CPU.
    """
    from tests.support.sglang_server import make_engine
    from tests.support.tiny import make_model

    folder = tmp_path_factory.mktemp("sglang")
    make_model(0).save_pretrained(folder / "model")
    engine = make_engine(sglang, folder / "model", folder, restarts=2)
    yield engine
    engine.close()


@pytest.fixture
def shared_by_name() -> Iterator[None]:
    """Share CPU memory with other processes by name, as processes need that are no children of this one.

    GPU memory is always shared by a handle.
    """
    import torch.multiprocessing

    earlier_strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(earlier_strategy)
