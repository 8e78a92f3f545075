"""The devices that a run may use, and what it needs them for."""

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


def named(worker_groups: list[WorkerGroup]) -> list[tuple[str, str, int]]:
    return [(workers.policy, workers.part, workers.devices) for workers in worker_groups]


def test_every_trainer_and_critic_needs_its_ranks_and_an_embedded_engine_a_cpu() -> None:
    critic = [
        "advantage=gae",
        *(f"+policies.{policy}.critic.lr=1e-3" for policy in ("solver", "verifier")),
    ]
    on_cpu = "+engine.device=cpu"
    assert named(list_worker_groups(config(*critic, on_cpu), "GPU")) == [
        ("solver", "trainer", 2),
        ("solver", "critic", 2),
        ("verifier", "trainer", 4),
        ("verifier", "critic", 4),
    ]
    for on_gpu in ([], ["+engine.device=cuda"]):
        on_gpus = named(list_worker_groups(config(*on_gpu), "GPU"))
        assert [workers for workers in on_gpus if workers[1] == "engine"] == [
            ("solver", "engine", 1),
            ("verifier", "engine", 1),
        ]
    frozen = config("+agents.verifier.loss_weight=0")
    assert named(list_worker_groups(frozen, "CPU")) == [
        ("solver", "trainer", 2),
        ("solver", "engine", 1),
        ("verifier", "engine", 1),
    ]


def test_split_adds_up_and_shared_takes_the_largest() -> None:
    worker_groups = list_worker_groups(config(), "CPU")
    assert count_devices(worker_groups, "split") == 2 + 1 + 4 + 1
    assert count_devices(worker_groups, "shared") == 4
    assert count_devices([], "split") == 0


def test_too_few_devices_are_refused_with_what_every_policy_needs() -> None:
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
            f"cluster.pool: {pool} needs {6 if pool == 'split' else 4} GPUs and there are {available} "
            f"(solver: trainer 2; verifier: trainer 4); {advice}"
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


def test_servers_on_one_gpu_need_their_shares_of_it() -> None:
    with pytest.raises(PlacementError) as caught:
        find_devices(config(*SERVERS), GPUS)
    assert str(caught.value) == (
        "engine.options: 2 servers are on each GPU, and each needs its share as mem-fraction-static, all of them at "
        "most 1 (solver none, verifier none); for example 0.40, or cluster.gpus for a planned one"
    )
    with pytest.raises(PlacementError, match=r"\(solver 0.6, verifier 0.6\)"):
        find_devices(config(*SERVERS, "+engine.options.mem-fraction-static=0.6"), GPUS)
    assert (
        find_devices(config(*SERVERS, "+engine.options.mem-fraction-static=0.4"), GPUS).device_type
        == "GPU"
    )


def test_two_versions_of_nccl_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path, with_pip=False)
    python = tmp_path / "bin" / "python"
    apart = [SERVERS[0], *SERVERS[3:], "engine.transport=distributed", f"engine.python={python}"]
    assert find_devices(config(*apart), GPUS).device_type == "GPU"  # nobody knows of NCCL there
    (packages,) = tmp_path.glob("lib/*/site-packages")
    (packages / "nvidia_nccl_cu13-9.9.9.dist-info").mkdir()
    (packages / "nvidia_nccl_cu13-9.9.9.dist-info" / "METADATA").write_text(
        "Name: nvidia-nccl-cu13\nVersion: 9.9.9\n"
    )
    here = [
        d.version
        for n in ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
        for d in metadata.distributions(name=n)
    ]
    assert nccl_version(str(python)) == "9.9.9"
    assert nccl_version(sys.executable) == "".join(here[:1])
    with monkeypatch.context() as patch:
        versions = {sys.executable: "2.29.7", str(python): "9.9.9"}
        patch.setattr(nccl, "nccl_version", versions.get)
        told = nccl_mismatch(python)
        versions[sys.executable] = "9.9.9"
        assert nccl_mismatch(python) is None
    assert told == (
        f"NCCL cannot connect two versions: this environment has 2.29.7, {python} has 9.9.9; install nvidia-nccl "
        "9.9.9 here (environment.post-deploy.sh)"
    )
    if here:
        with pytest.raises(
            PlacementError,
            match=r"policies.solver: engine.transport: distributed: NCCL cannot connect two",
        ):
            find_devices(config(*apart), GPUS)


def test_ranks_that_share_tensors_need_one_node() -> None:
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


def test_the_nodes_of_a_cluster_give_what_ray_counts() -> None:
    nodes = [
        Node(address=f"10.0.0.{n}", id=f"n{n}", gpus=0, cpus=cpus) for n, cpus in ((1, 3), (2, 5))
    ]
    devices = find_devices(config(), nodes)
    assert (devices.device_type, devices.nodes) == ("CPU", {"n1": 3, "n2": 5})
    assert (devices.describe()["count"], devices.describe()["nodes"]) == (8, 2)
    gpus = [
        Node(address="10.0.0.3", id="n3", gpus=8, cpus=64),
        *nodes,
    ]  # nodes without GPUs take no part
    assert find_devices(config(), gpus).nodes == {"n3": 8, "n1": 0, "n2": 0}
    with pytest.raises(PlacementError, match=r"needs 8 CPUs and there are 3 "):
        find_devices(config(), nodes[:1])


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
def test_addresses_that_cannot_be_are_refused(address: str, problem: str) -> None:
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
            "nodes are those of a running Ray: set address",
        ),
        (
            ["+cluster.nodes.solver.train='a b'", "+cluster.address=auto"],
            "cluster.nodes.solver.train: ",
        ),
        (
            ["+engine.replicas=2", "+cluster.pool=shared"],
            "policies.solver: several actors of its engine have a device",
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
            "cluster.nodes.solver.rollout: the embedded engine runs on the node of the command",
        ),
    ],
)
def test_nodes_and_replicas_that_cannot_be_are_refused(settings: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(*settings)


def test_a_machine_without_gpus_gives_what_it_is_told_to() -> None:
    assert find_devices(config("cluster.cpus=40")).ray_cpus == 40


def test_processes_that_work_at_a_time_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads(*overrides: str) -> int:
        run = config(*overrides)
        return find_devices(run).threads_per_process(run)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(40))
    monkeypatch.setenv(
        "OMP_NUM_THREADS", "16"
    )  # six ranks, and two engines that wait while they train
    assert threads() == 16 // 6
    assert threads("+trainer.staleness=1") == 16 // (6 + 2)
    assert threads("cluster.threads_per_process=5") == 5
    node = Node(address="10.0.0.1", id="n1", gpus=0, cpus=8, is_driver=True)
    assert find_devices(config(), [node]).threads_per_process(config()) == 1
    assert (
        threads("+engine.deterministic=true") == 1
    )  # a product's bits depend on what else two threads multiply
    with pytest.raises(
        ConfigError,
        match=r"cluster.threads_per_process: 2, but on a CPU engine.deterministic needs 1 thread",
    ):
        config("+engine.deterministic=true", "cluster.threads_per_process=2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads() == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    one = "policies.solver.tp=1", "+agents.verifier.loss_weight=0"  # a rank, two engines
    for quota, cores in (("max 100000\n", 8), ("600000 100000\n", 6), ("50000 100000\n", 1)):
        (tmp_path / "cpu.max").write_text(quota)
        monkeypatch.setattr(machine, "_CPU_QUOTA", tmp_path / "cpu.max")
        assert threads(*one) == max(1, cores // 2)
    monkeypatch.setattr(machine, "_CPU_QUOTA", tmp_path / "nowhere")
    assert threads(*one) == 8 // 2  # of 40


def test_groups_with_a_label_need_nodes_that_have_it() -> None:
    nodes = [
        Node(address="10.0.0.1", id="n1", gpus=0, cpus=4),
        Node(address="10.0.0.2", id="n2", gpus=0, cpus=4, pool="a"),
    ]
    one_rank = [f"policies.verifier.{size}=1" for size in ("pp", "cp")]
    one_rank += ["policies.verifier.overlap=false", "+cluster.address=auto"]
    servers = ["engine=sglang", "engine.python=p"]
    apart = config(*one_rank, *servers, "+cluster.nodes.solver={train: a, rollout: b}")
    assert [
        (group.policy, group.part, group.node_label) for group in list_worker_groups(apart, "CPU")
    ] == [
        ("solver", "trainer", "a"),
        ("solver", "engine", "b"),
        ("verifier", "trainer", None),
        ("verifier", "engine", None),
    ]
    with pytest.raises(PlacementError) as caught:
        find_devices(apart, nodes)
    assert str(caught.value) == (
        "cluster.nodes.solver: no node has the label pool=b for its engine (there are a); start one with "
        "`ray start --labels pool=b`"
    )

    together = [*one_rank, *servers, "+cluster.nodes.solver={train: a, rollout: a}"]
    assert find_devices(config(*together), nodes).labels == {"n1": None, "n2": "a"}
    too_many = config(*together, "+policies.solver.overrides.engine.replicas=3")
    with pytest.raises(
        PlacementError,
        match=r"^nodes with the label pool=a: cluster.pool: split needs 5 CPUs and there",
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
