"""A run whose processes cannot each have a GPU shares the GPUs that there are."""

from functools import cache

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.pipeline import check
from mcore_mas.planning.jobs import job_needs
from mcore_mas.planning.shared_pool import fit_pool, memory_share
from mcore_mas.planning.worker_groups import count_devices, list_worker_groups
from mcore_mas.runtime.devices import find_devices, fit_to_machine

EXPERIMENT = "drmas_t1_4b_separate_drmas"
# two trainers of one rank, and an engine of each policy
ONE_RANK = ("policy_defaults.tp=1", "policy_defaults.dp=1", "policy_defaults.sp=false")
EMBEDDED = (*ONE_RANK, "engine={name: embedded, python: null}")


@cache
def config(*overrides: str) -> RunConfig:
    return RunConfig.from_values(resolve([f"experiment={EXPERIMENT}", *overrides]), EXPERIMENT)


def test_a_run_that_needs_four_gpus_takes_turns_on_one() -> None:
    split = config(*EMBEDDED)
    shared, line = fit_pool(split, 1)
    assert line == (
        "cluster.pool: split needs 4 GPUs and there is 1: trainers and engines share it and take "
        "turns (cluster.pool: shared)"
    )
    assert count_devices(list_worker_groups(shared, "GPU"), shared.cluster.pool) == 1
    assert shared.engine.sleep
    assert all(shared.policies[policy].offload for policy in shared.trained)
    _, line = fit_pool(split, 3)
    assert "there are 3: trainers and engines share them and" in line


def test_servers_that_share_a_gpu_get_shares_of_its_memory() -> None:
    shared, _ = fit_pool(config(*ONE_RANK, "engine.transport=distributed"), 1)
    assert shared.engine.transport == "tensor"
    assert memory_share(shared.engine) == 0.4
    chosen = config(*ONE_RANK, "+engine.options.mem-fraction-static=0.3")
    assert memory_share(fit_pool(chosen, 1)[0].engine) == 0.3


def test_a_run_that_collects_ahead_shares_without_turns() -> None:
    shared, line = fit_pool(config(*EMBEDDED, "trainer.staleness=1"), 1)
    assert line.endswith("share it (cluster.pool: shared)")
    assert not shared.engine.sleep


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        (EMBEDDED, 4),  # enough for all
        ((*EMBEDDED, "policies.solver.dp=2"), 1),  # too few even for one trainer
        ((*EMBEDDED, "cluster.pool=shared"), 1),
        ((*EMBEDDED, "engine.replicas=2"), 2),  # several actors of an engine cannot share a GPU
    ],
)
def test_other_runs_stay_as_they_are(overrides: tuple[str, ...], gpus: int) -> None:
    run = config(*overrides)
    assert fit_pool(run, gpus) == (run, "")


def test_a_training_fits_itself_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(*EMBEDDED)
    assert fit_to_machine(run) == (run, "")  # there is no GPU here
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    shared, line = fit_to_machine(run)
    assert line
    devices = find_devices(shared)
    assert (devices.device_type, devices.pool, devices.ray_gpus) == ("GPU", "shared", 1)


def test_the_check_and_a_job_count_the_shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(*EMBEDDED, "policy_defaults.model=Qwen/Qwen2.5-0.5B-Instruct")
    assert job_needs(run, "train", 1).gpus == job_needs(run, "train", 1).nodes == 1
    assert job_needs(run, "train", 8).gpus == 4

    monkeypatch.setattr(check, "count_visible_gpus", lambda: 1)
    two_ranks = config(*EMBEDDED, "policies.solver.dp=2")
    problems = {
        name: [line for line in check.machine_problems(checked) if "cluster.pool" in line]
        for name, checked in {"fits": run, "too large": two_ranks}.items()
    }
    assert problems["fits"] == []
    too_large = problems["too large"][0]
    assert too_large.startswith("cluster.pool: split needs 5 GPUs (")
    assert "), and there are 1; " in too_large
