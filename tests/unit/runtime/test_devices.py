"""Devices of a run: how many its trainers and engines need, and the nodes that have them."""

import os
import sys
import venv
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.planning import machine
from mcore_mas.planning.worker_groups import (
    PlacementError,
    WorkerGroup,
    check_fits,
    count_devices,
    list_worker_groups,
)
from mcore_mas.runtime.cluster import Node
from mcore_mas.runtime.devices import find_devices
from rollout.engines.sglang import nccl
from rollout.engines.sglang.nccl import nccl_mismatch, nccl_version

LAYOUT = [
    "cluster.device=auto",
    "policies.solver.tp=2",
    "+policies.verifier.pp=2",
    "+policies.verifier.cp=2",
    "+policies.verifier.overlap=true",
]


def config(*overrides: str) -> RunConfig:
    return RunConfig.from_values(resolve(["experiment=demo_math", *LAYOUT, *overrides]), "a test")


def summarize(worker_groups: list[WorkerGroup]) -> list[tuple[str, str, int]]:
    return [(group.policy, group.part, group.devices) for group in worker_groups]


def test_trainers_and_critics_need_a_device_per_rank_and_engines_one_each() -> None:
    critics = [
        "advantage=gae",
        "+policies.solver.critic.lr=1e-3",
        "+policies.verifier.critic.lr=1e-3",
    ]
    engine_on_cpu = config(*critics, "+engine.device=cpu")
    assert summarize(list_worker_groups(engine_on_cpu, "GPU")) == [
        ("solver", "trainer", 2),
        ("solver", "critic", 2),
        ("verifier", "trainer", 4),
        ("verifier", "critic", 4),
    ]
    for engine_on_gpu in (config(), config("+engine.device=cuda")):
        groups = list_worker_groups(engine_on_gpu, "GPU")
        assert summarize([group for group in groups if group.part == "engine"]) == [
            ("solver", "engine", 1),
            ("verifier", "engine", 1),
        ]
    frozen_verifier = config("+agents.verifier.loss_weight=0")
    assert summarize(list_worker_groups(frozen_verifier, "CPU")) == [
        ("solver", "trainer", 2),
        ("solver", "engine", 1),
        ("verifier", "engine", 1),
    ]


def test_a_split_pool_needs_the_sum_of_all_groups_and_a_shared_pool_the_largest() -> None:
    worker_groups = list_worker_groups(config(), "CPU")
    assert count_devices(worker_groups, "split") == 2 + 1 + 4 + 1
    assert count_devices(worker_groups, "shared") == 4
    assert count_devices([], "split") == 0


def test_too_few_devices_are_refused_with_the_needs_of_each_policy() -> None:
    worker_groups = list_worker_groups(config("+engine.device=cpu"), "GPU")
    check_fits(worker_groups, "split", "GPU", [6])
    check_fits(worker_groups, "split", "GPU", [4, 2])
    check_fits(worker_groups, "shared", "GPU", [4])
    for pool, available, advice in [
        ("split", 5, "use cluster.pool: shared, which needs 4, "),
        ("split", 3, "use fewer ranks, "),
        ("shared", 3, "use fewer ranks, "),
    ]:
        with pytest.raises(PlacementError) as caught:
            check_fits(worker_groups, pool, "GPU", [available])
        assert str(caught.value) == (
            f"cluster.pool: {pool} needs {6 if pool == 'split' else 4} GPUs "
            f"(solver: trainer 2; verifier: trainer 4), and there are {available}; {advice}"
            "or compute on CPUs: cluster.device: cpu, or more GPUs"
        )


SERVERS = [
    "engine=sglang",
    "engine.transport=tensor",
    "cluster.pool=shared",
    "policies.verifier.pp=1",
    "policies.solver.tp=1",
    "policies.verifier.cp=1",
    "policies.verifier.overlap=false",
]
GPUS = [Node(address="10.0.0.3", id="n3", gpus=8, cpus=64)]


def test_servers_that_share_a_gpu_need_memory_fractions_of_at_most_1_together() -> None:
    with pytest.raises(PlacementError) as caught:
        find_devices(config(*SERVERS), GPUS)
    assert str(caught.value) == (
        "engine.options: 2 servers are on each GPU, and each needs its share as mem-fraction-static, at most 1 "
        "in total (solver none, verifier none); set it, for example to 0.40, or set cluster.gpus to have the shares "
        "planned"
    )
    with pytest.raises(PlacementError, match=r"\(solver 0.6, verifier 0.6\)"):
        find_devices(config(*SERVERS, "+engine.options.mem-fraction-static=0.6"), GPUS)
    assert (
        find_devices(config(*SERVERS, "+engine.options.mem-fraction-static=0.4"), GPUS).device_type
        == "GPU"
    )


def test_different_nccl_versions_of_trainer_and_server_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path, with_pip=False)
    python = tmp_path / "bin" / "python"
    own_gpus = [*SERVERS, "cluster.pool=split", "engine.transport=distributed"]
    own_gpus.append(f"engine.python={python}")
    # The engine's environment has no NCCL yet, so there is nothing to compare.
    assert find_devices(config(*own_gpus), GPUS).device_type == "GPU"

    (packages,) = tmp_path.glob("lib/*/site-packages")
    nccl_package = packages / "nvidia_nccl_cu13-9.9.9.dist-info"
    nccl_package.mkdir()
    (nccl_package / "METADATA").write_text("Name: nvidia-nccl-cu13\nVersion: 9.9.9\n")
    installed_versions = [
        distribution.version
        for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
        for distribution in metadata.distributions(name=name)
    ]
    assert nccl_version(str(python)) == "9.9.9"
    assert nccl_version(sys.executable) == "".join(installed_versions[:1])

    with monkeypatch.context() as patch:
        versions = {sys.executable: "2.29.7", str(python): "9.9.9"}
        patch.setattr(nccl, "nccl_version", versions.get)
        mismatch = nccl_mismatch(python)
        versions[sys.executable] = "9.9.9"
        assert nccl_mismatch(python) is None
    assert mismatch == (
        f"NCCL cannot connect two versions: this environment has 2.29.7, {python} has 9.9.9; install nvidia-nccl "
        "9.9.9 here (environment.post-deploy.sh)"
    )
    if installed_versions:
        with pytest.raises(
            PlacementError,
            match=r"policies.solver: engine.transport: distributed: NCCL cannot connect two",
        ):
            find_devices(config(*own_gpus), GPUS)


def test_tensor_parallel_ranks_need_one_node() -> None:
    worker_groups = list_worker_groups(config("+engine.device=cpu"), "GPU")
    assert [(workers.policy, workers.tp) for workers in worker_groups] == [
        ("solver", 2),
        ("verifier", 1),
    ]
    with pytest.raises(PlacementError) as caught:
        check_fits(worker_groups, "split", "GPU", [1] * 6)
    assert str(caught.value) == (
        "solver: trainer needs 2 GPUs of one node (tp), and the largest of 6 nodes has 1; use a smaller tp"
    )


def test_the_devices_of_a_cluster_are_those_of_its_nodes() -> None:
    nodes = [
        Node(address="10.0.0.1", id="n1", gpus=0, cpus=3),
        Node(address="10.0.0.2", id="n2", gpus=0, cpus=5),
    ]
    devices = find_devices(config(), nodes)
    assert (devices.device_type, devices.nodes) == ("CPU", {"n1": 3, "n2": 5})
    assert (devices.describe()["count"], devices.describe()["nodes"]) == (8, 2)
    # On a cluster with GPUs, the nodes without GPUs give no devices.
    assert find_devices(config(), [*GPUS, *nodes]).nodes == {"n3": 8, "n1": 0, "n2": 0}
    with pytest.raises(PlacementError, match=r"needs 8 CPUs .*, and there are 3;"):
        find_devices(config(), nodes[:1])
    with pytest.raises(PlacementError, match=r"cluster\.device: cuda, and no node has a GPU;"):
        find_devices(config("cluster.device=cuda"), nodes)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        (
            "ray://10.0.0.1:10001",
            "Ray's client was removed; submit the command .* `ray job submit`",
        ),
        ("10.0.0.1", "expected local, auto, or "),
        ("head:port", "expected local, auto, or "),
    ],
)
def test_an_invalid_cluster_address_is_refused(address: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(f"+cluster.address='{address}'")
    with pytest.raises(ConfigError, match=r"cpus is for a Ray that is started"):
        config("+cluster.address=auto", "+cluster.cpus=2")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            ["+cluster.nodes.sover.train=a", "+cluster.address=auto"],
            "cluster.nodes: no policy is called 'sover'; ",
        ),
        (
            ["+cluster.nodes.solver.train=a"],
            "nodes names nodes of a running Ray: set address",
        ),
        (
            ["+cluster.nodes.solver.train='a b'", "+cluster.address=auto"],
            "cluster.nodes.solver.train: ",
        ),
        (
            ["+engine.replicas=2", "+cluster.pool=shared"],
            "policies.solver: engine.replicas: 2 starts several actors of the embedded engine, ",
        ),
        (
            ["+engine.replicas=2", "+engine.transport=shared"],
            "use cluster.pool: split and no engine.transport, or ",
        ),
        (
            ["+engine.joining=1"],
            "engine.joining was removed: start all actors with engine.replicas",
        ),
        (
            ["+cluster.nodes.solver={train: a, rollout: b}", "+cluster.address=auto"],
            "cluster.nodes.solver.rollout: the embedded engine runs on the node where the command was started",
        ),
    ],
)
def test_invalid_node_labels_and_replicas_are_refused(settings: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(*settings)


def test_cluster_cpus_sets_the_cpus_of_the_local_ray() -> None:
    assert find_devices(config("cluster.cpus=40")).ray_cpus == 40


def test_processes_that_run_at_the_same_time_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads(*overrides: str) -> int:
        run = config(*overrides)
        return find_devices(run).threads_per_process(run)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(40))
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    # There are six ranks and two engines. The engines wait while the ranks train.
    assert threads() == 16 // 6
    assert threads("+trainer.staleness=1") == 16 // (6 + 2)
    assert threads("cluster.threads_per_process=5") == 5
    node = Node(address="10.0.0.1", id="n1", gpus=0, cpus=8, is_driver=True)
    assert find_devices(config(), [node]).threads_per_process(config()) == 1
    # With several threads, the bits of a matrix product depend on the other rows of its batch.
    assert threads("+engine.deterministic=true") == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads() == 1
    monkeypatch.delenv("OMP_NUM_THREADS")

    one_rank = ["policies.solver.tp=1", "+agents.verifier.loss_weight=0"]  # and two engines
    for quota, cores in (("max 100000\n", 8), ("600000 100000\n", 6), ("50000 100000\n", 1)):
        (tmp_path / "cpu.max").write_text(quota)
        monkeypatch.setattr(machine, "_CPU_QUOTA", tmp_path / "cpu.max")
        assert threads(*one_rank) == max(1, cores // 2)
    monkeypatch.setattr(machine, "_CPU_QUOTA", tmp_path / "nowhere")
    assert threads(*one_rank) == 8 // 2  # 8 threads at most, although there are 40 cores


SGLANG = ("engine=sglang", "engine.python=p")
VERIFIER_ON_CPU = "+policies.verifier.overrides.engine={name: embedded, device: cpu}"


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("+engine.device=cpu", "cluster.device=cuda"),
        (*SGLANG, VERIFIER_ON_CPU),
    ],
)
def test_a_deterministic_engine_that_may_be_on_a_cpu_has_one_thread(
    settings: tuple[str, ...],
) -> None:
    line = r"cluster.threads_per_process: 2, but on a CPU, engine.deterministic needs 1 thread"
    with pytest.raises(ConfigError, match=line):
        config(*settings, "+engine.deterministic=true", "cluster.threads_per_process=2")


@pytest.mark.parametrize(
    "settings",
    [
        ("cluster.device=cuda",),
        ("cluster.device=cuda", "+cluster.address=auto"),
        ("+engine.device=cuda",),
        SGLANG,
    ],
)
def test_a_deterministic_engine_on_a_gpu_may_have_several_threads(
    settings: tuple[str, ...],
) -> None:
    run = config(*settings, "+engine.deterministic=true", "cluster.threads_per_process=2")
    assert run.cluster.threads_per_process == 2


def test_groups_with_a_label_need_nodes_that_have_it() -> None:
    nodes = [
        Node(address="10.0.0.1", id="n1", gpus=0, cpus=4),
        Node(address="10.0.0.2", id="n2", gpus=0, cpus=4, pool="a"),
    ]
    one_rank = [f"policies.verifier.{size}=1" for size in ("pp", "cp")]
    one_rank += ["policies.verifier.overlap=false", "+cluster.address=auto"]
    servers = ["engine=sglang", "engine.python=p"]
    two_labels = config(*one_rank, *servers, "+cluster.nodes.solver={train: a, rollout: b}")
    assert [
        (group.policy, group.part, group.node_label)
        for group in list_worker_groups(two_labels, "CPU")
    ] == [
        ("solver", "trainer", "a"),
        ("solver", "engine", "b"),
        ("verifier", "trainer", None),
        ("verifier", "engine", None),
    ]
    with pytest.raises(PlacementError) as caught:
        find_devices(two_labels, nodes)
    assert str(caught.value) == (
        "cluster.nodes.solver: no node has the label pool=b for its engine (there are a); start one with "
        "`ray start --labels pool=b`"
    )

    one_label = [*one_rank, *servers, "+cluster.nodes.solver={train: a, rollout: a}"]
    assert find_devices(config(*one_label), nodes).labels == {"n1": None, "n2": "a"}
    too_many = config(*one_label, "+policies.solver.overrides.engine.replicas=3")
    with pytest.raises(
        PlacementError,
        match=r"^nodes with the label pool=a: cluster.pool: split needs 5 CPUs .*, and there are",
    ):
        find_devices(too_many, [*nodes, replace(nodes[0], id="n3")])


def test_embedded_engines_need_devices_on_the_node_of_the_command() -> None:
    nodes = [
        Node(address="10.0.0.1", id="n1", gpus=0, cpus=1, is_driver=True),
        Node(address="10.0.0.2", id="n2", gpus=0, cpus=16),
    ]
    with pytest.raises(
        PlacementError,
        match=r"^embedded engines run on the node of the command and need 2 CPUs there, and it has 1;",
    ):
        find_devices(config(), nodes)
    devices = find_devices(config(), [replace(nodes[0], cpus=2), nodes[1]])
    assert devices.joined
    assert devices.driver_node == "n1"
