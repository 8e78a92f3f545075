"""Jobs request the resources that their run needs."""

import json
from functools import cache
from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.planning.estimate import load_architectures
from mcore_mas.planning.jobs import (
    JobNeeds,
    job_needs,
    object_store_mb,
    retry_memory_mb,
    tasks_mb,
)
from mcore_mas.planning.memory import count_parameters
from mcore_mas.planning.worker_groups import gpus_per_engine, list_worker_groups

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "intermediate_size": 6144, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "num_experts": 128, "hidden_act": "silu",
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip

# A run of one 4B policy: four ranks of its trainer, and one server.
ONE_POLICY = "drmas_t1_4b_shared_drmas"
# A run of four 7B policies with critics: 36 GPUs.
FOUR_POLICIES = "unitymas_t3_hotpotqa_m_ask_7b"


@cache
def config(experiment: str, *overrides: str) -> RunConfig:
    return RunConfig.from_values(resolve([f"experiment={experiment}", *overrides]), experiment)


def train_mb(experiment: str, *overrides: str) -> int:
    """Return the memory in MB that the training of an experiment requests."""
    return job_needs(config(experiment, *overrides), "train", 8).memory_mb


def sparse_file(path: Path, size: int) -> Path:
    """Make a file of this size that takes no space."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_a_training_on_cpus_requests_its_processes() -> None:
    run = config("demo_math")
    processes = 2 + 1 + 1 + 1  # two ranks of the solver, one of the verifier, an engine of each
    assert job_needs(run, "train", 8) == JobNeeds(
        nodes=1,
        gpus=0,
        cpus=processes + 1,
        memory_mb=700 + 256 + processes * 600,
    )
    threads = config("demo_math", "cluster.threads_per_process=4")
    assert job_needs(threads, "train", 8).cpus == processes * 4 + 1


def test_an_evaluation_on_cpus_requests_its_engines() -> None:
    needs = job_needs(config("demo_math"), "evaluate", 8)
    assert needs == JobNeeds(nodes=1, gpus=0, cpus=2 + 1, memory_mb=700 + 2 * 600)


# Two policies of Qwen2.5-0.5B, each with an embedded engine.
TWO_SMALL = (
    "engine={name: embedded, python: null, slots: 16, max_length: 8192}",
    "policy_defaults.model=Qwen/Qwen2.5-0.5B-Instruct",
    "policy_defaults.recompute=full",
)
TWO_POLICIES = "drmas_t1_4b_separate_drmas"
SMALL_PARAMETERS = 494_032_768
# 24 layers, two heads of 64, keys and values in float32
SMALL_SEQUENCE = 8192 * 24 * 2 * 64 * 2 * 4


def test_models_on_cpus_take_memory() -> None:
    run = config(TWO_POLICIES, *TWO_SMALL, "cluster.device=cpu")
    # An engine has its weights in float32, a copy in bfloat16, and its KV cache.
    engine = (4 + 2) * SMALL_PARAMETERS + 16 * SMALL_SEQUENCE
    needs = job_needs(run, "evaluate", 8)
    assert (needs.gpus, needs.memory_mb) == (0, 700 + 2 * 600 + int(2 * engine / 1e6))

    # A trainer has weights in bfloat16, gradients, master weights and moments, besides activations.
    # An engine that is trained has a second buffer for weights.
    least = 2 * (18 * SMALL_PARAMETERS + engine + 4 * SMALL_PARAMETERS)
    training = job_needs(run, "train", 8)
    assert training.gpus == 0
    assert least / 1e6 < training.memory_mb < 3 * least / 1e6
    fewer_slots = config(TWO_POLICIES, *TWO_SMALL, "cluster.device=cpu", "engine.slots=8")
    saved = training.memory_mb - job_needs(fewer_slots, "train", 8).memory_mb
    assert saved == pytest.approx(2 * 8 * SMALL_SEQUENCE / 1e6, abs=1)


def test_a_model_that_is_too_large_for_cpus_gets_gpus() -> None:
    assert job_needs(config(TWO_POLICIES, *TWO_SMALL), "train", 8).gpus == 2 * 2 + 2
    on_cpus = (*TWO_SMALL, "engine.device=cpu")
    assert job_needs(config(TWO_POLICIES, *on_cpus), "train", 8).gpus == 0


@pytest.mark.parametrize("device_type", ["CPU", "GPU"])
def test_every_server_of_an_engine_has_devices_of_its_own(device_type: str) -> None:
    overrides = ["engine=sglang", "engine.replicas=3", "+policies.solver.overrides.engine.tp=2"]
    engines = [
        (workers.policy, workers.devices, workers.tp)
        for workers in list_worker_groups(config("demo_math", *overrides), device_type)
        if workers.part == "engine"
    ]
    assert engines == [("solver", 6, 2), ("verifier", 3, 1)]


def test_servers_that_run_elsewhere_need_no_devices() -> None:
    overrides = ["engine=sglang", "engine.python=null", "+engine.urls=['http://127.0.0.1:1']"]
    worker_groups = list_worker_groups(config("demo_math", *overrides), "CPU")
    assert {workers.part for workers in worker_groups} == {"trainer"}


def test_the_object_store_has_room_for_the_samples_of_a_step_twice() -> None:
    assert object_store_mb(config("demo_math", "cluster.object_store_mb=300")) == 300
    assert object_store_mb(config("demo_math")) == 256
    tokens = 1024 * 4096  # see test_workload.py
    assert object_store_mb(config(ONE_POLICY)) == 2 * 72 * tokens // 2**20


def test_recorded_experts_take_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    overrides = [f"policy_defaults.model={tmp_path}"]
    replayed = [*overrides, "engine.router_replay=true"]
    tokens = 1024 * 4096
    experts = 48 * 8  # one byte for each layer and expert of a token

    store_mb = object_store_mb(config(ONE_POLICY, *replayed))
    assert store_mb == 2 * (72 + experts) * tokens // 2**20
    more_store_mb = store_mb - object_store_mb(config(ONE_POLICY, *overrides))
    more_driver_mb = 2 * experts * tokens // 10**6
    more_mb = train_mb(ONE_POLICY, *replayed) - train_mb(ONE_POLICY, *overrides)
    assert more_mb == more_store_mb + more_driver_mb


def test_tasks_are_made_in_memory_for_their_files(tmp_path: Path) -> None:
    file = sparse_file(tmp_path / "deepcoder.jsonl", 2 * 10**9)
    assert tasks_mb([]) == 1_000
    assert tasks_mb([tmp_path / "missing"]) == 1_000
    assert tasks_mb([file]) == 21_000


def test_programs_in_sandboxes_take_memory() -> None:
    needs = job_needs(config("strongermas_t1_code_single"), "evaluate", 8)
    assert needs.memory_mb == 16_000 + needs.gpus * 6_000 + 2_000


def test_a_training_requests_the_gpus_of_its_placement() -> None:
    split = job_needs(config(ONE_POLICY), "train", 8)
    assert (split.nodes, split.gpus) == (1, 4 + 1)
    shared = job_needs(config(ONE_POLICY, "cluster.pool=shared"), "train", 8)
    assert (shared.nodes, shared.gpus) == (1, 4)


@pytest.mark.parametrize(("node_gpus", "gpus"), [(1, 1), (2, 2), (8, 8)])
def test_an_evaluation_requests_no_more_gpus_than_a_machine_has(node_gpus: int, gpus: int) -> None:
    """Four engines share one or two GPUs; of eight each policy has two."""
    embedded = config(FOUR_POLICIES, "engine={name: embedded, python: null}")
    needs = job_needs(embedded, "evaluate", node_gpus)
    assert (needs.nodes, needs.gpus) == (1, gpus)


def test_servers_of_an_evaluation_are_on_all_nodes_of_the_training() -> None:
    run = config(
        FOUR_POLICIES, "retriever.urls=[http://search:8000]", "retriever.folder=null"
    )  # 36 GPUs
    needs = job_needs(run, "evaluate", 8)
    assert (needs.nodes, needs.gpus) == (5, 8)
    assert needs.memory_mb == 16_000 + 8 * 6_000  # of each node
    assert job_needs(run, "evaluate", 64) == JobNeeds(
        nodes=1, gpus=36, cpus=36 + 2 + 36, memory_mb=16_000 + 36 * 6_000
    )


def test_an_evaluation_of_embedded_engines_on_gpus() -> None:
    run = config("demo_math", "+engine.device=cuda", "cluster.device=auto")
    assert job_needs(run, "evaluate", 8).gpus == 4


def test_a_teacher_has_no_engine_in_an_evaluation() -> None:
    run = config(
        "demo_math",
        "+engine.device=cuda",
        "cluster.device=auto",
        "+policies.teacher={model: big}",
        "+policies.solver.teacher={policy: teacher}",
    )
    engines = [
        workers.policy for workers in list_worker_groups(run, "GPU") if workers.part == "engine"
    ]
    assert engines == ["solver", "verifier", "teacher"]  # of the training
    assert gpus_per_engine(run) == {"solver": 1, "verifier": 1}


@pytest.mark.parametrize(
    ("experiment", "policy"),
    [
        (
            "demo_math",
            ("+policies.big={model: Qwen/Qwen3-4B}", "+policies.solver.teacher={policy: big}"),
        ),
        ("demo_poker", ("+policies.big={model: Qwen/Qwen3-4B}", "+opponents={big: {}}")),
    ],
)
def test_teachers_and_opponents_add_nothing_to_an_evaluation_on_cpus(
    experiment: str, policy: tuple[str, str]
) -> None:
    without = config(experiment, "cluster.device=cpu")
    assert job_needs(config(experiment, "cluster.device=cpu", *policy), "evaluate", 8) == job_needs(
        without, "evaluate", 8
    )


def test_workers_of_an_environment_have_a_cpu_each() -> None:
    without = job_needs(config("demo_math", "cluster.device=cpu"), "train", 8)
    needs = job_needs(config("demo_math", "cluster.device=cpu", "+env.workers=3"), "train", 8)
    assert needs.cpus == without.cpus + 3
    assert needs.memory_mb == without.memory_mb + 600


def test_the_opponent_has_no_engine_in_an_evaluation() -> None:
    run = config(
        "demo_poker",
        "+engine.device=cuda",
        "cluster.device=auto",
        "+policies.rival={model: big}",
        "+opponents={rival: {}}",
    )
    assert run.played == ("shared", "rival")
    assert gpus_per_engine(run) == {"shared": 1}


@pytest.mark.parametrize(("node_gpus", "nodes"), [(8, 5), (4, 9)])
def test_a_training_that_does_not_fit_one_machine_gets_whole_ones(
    node_gpus: int, nodes: int
) -> None:
    needs = job_needs(config(FOUR_POLICIES), "train", node_gpus)
    assert (needs.nodes, needs.gpus) == (nodes, node_gpus)


def test_weights_on_their_way_to_engines_take_memory() -> None:
    (model,) = load_architectures(config(ONE_POLICY)).values()
    nccl_mb = train_mb(ONE_POLICY, "engine.transport=distributed")
    disk_mb = train_mb(ONE_POLICY, "engine.transport=disk")
    old_and_new = 2 * 2 * count_parameters(model)
    assert disk_mb - nccl_mb == pytest.approx(old_and_new / 1e6, rel=0.01)


def test_offloaded_trainers_take_memory() -> None:
    (model,) = load_architectures(config(ONE_POLICY)).values()
    transport = "engine.transport=distributed"
    resident_mb = train_mb(ONE_POLICY, transport)
    offloaded_mb = train_mb(ONE_POLICY, transport, "policies.shared.offload=true")
    # Weights are on both data-parallel ranks, which share the optimizer state.
    offloaded = (2 * 2 + 12) * count_parameters(model)
    assert offloaded_mb - resident_mb == pytest.approx(offloaded / 1e6, rel=0.01)


def test_moments_in_host_memory_take_memory() -> None:
    (model,) = load_architectures(config(ONE_POLICY)).values()
    more_mb = train_mb(ONE_POLICY, "policies.shared.host_moments=true") - train_mb(ONE_POLICY)
    assert more_mb == pytest.approx(8 * count_parameters(model) / 1e6, rel=0.01)


def test_a_published_index_takes_memory_for_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "wiki"
    run = config("demo_search", f"retriever.folder={folder}", "retriever.passages=null")
    assert job_needs(run, "index", 8).memory_mb == 1_000 + 80_000  # it is not there yet
    folder.mkdir()
    sparse_file(folder / "vectors", 8_000_000_000)
    assert job_needs(run, "index", 8).memory_mb == 1_000 + 8_000 * 5 // 4 + 900


@pytest.mark.parametrize(
    ("ranking", "building_mb", "serving_mb"),
    [
        ("dense", 1_536 * 5 // 4, 1_536 * 5 // 4),  # 384 float32
        ("bm25", 3_600 * 5 // 4, 600 * 5 // 4),
    ],
)
def test_an_index_of_a_million_passages_takes_memory(
    tmp_path: Path, ranking: str, building_mb: int, serving_mb: int
) -> None:
    corpus = sparse_file(tmp_path / "c.jsonl", 660 * 1_000_000)
    overrides = [f"retriever.passages={corpus}", f"retriever.ranking={ranking}"]
    run = config("demo_search", *overrides)
    assert job_needs(run, "index", 8).memory_mb == 1_000 + 900 + building_mb
    assert train_mb("demo_search", *overrides) - train_mb("demo_search") == serving_mb


def test_a_small_index_is_part_of_the_retriever() -> None:
    assert job_needs(config("demo_search"), "index", 8).memory_mb == 1_000 + 900


def test_threads_of_a_retriever_take_cpus() -> None:
    plain = config("demo_search")
    threads = config("demo_search", "retriever.threads=4")
    assert job_needs(threads, "index", 8).cpus == 4
    more_cpus = job_needs(threads, "train", 8).cpus - job_needs(plain, "train", 8).cpus
    assert more_cpus == 3


@pytest.mark.parametrize(
    ("planned", "attempt", "requested"),
    [
        (3_000, 1, 3_000),
        (3_000, 2, 6_000),
        (950_000, 2, 1_000_000),  # not 1.9 TB, which no machine has
        (950_000, 3, 1_000_000),
        (1_200_000, 1, 1_200_000),  # the plan stands: Slurm says that no machine has as much
        (1_200_000, 2, 1_200_000),
    ],
)
def test_a_retry_requests_at_most_the_memory_of_a_machine(
    planned: int, attempt: int, requested: int
) -> None:
    assert retry_memory_mb(planned, attempt, node_mb=1_000_000) == requested
