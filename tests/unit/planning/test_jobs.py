"""What jobs ask a cluster for comes from the plan of their run."""

import json
from functools import cache
from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.planning.choose import placement_of, shapes_of
from mcore_mas.planning.jobs import JobNeeds, job_needs, object_store_mb, tasks_mb
from mcore_mas.planning.memory import count_parameters
from mcore_mas.planning.worker_groups import list_worker_groups


@cache
def config(experiment: str, *overrides: str) -> RunConfig:
    return RunConfig.check(resolve([f"experiment={experiment}", *overrides]), experiment)


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "intermediate_size": 6144, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "num_experts": 128, "hidden_act": "silu",
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip


def test_a_run_on_cpus_asks_for_its_processes() -> None:
    # the solver is cut in two, the verifier is not; an engine of each; the driver beside them
    two = config("demo_math")
    assert job_needs(two, "train", 8) == JobNeeds(
        nodes=1, gpus=0, cpus=6, memory_mb=700 + 256 + 5 * 600
    )
    threads = config("demo_math", "cluster.threads_per_process=4")
    assert job_needs(threads, "train", 8).cpus == 5 * 4 + 1
    assert job_needs(two, "evaluate", 8) == JobNeeds(
        nodes=1, gpus=0, cpus=3, memory_mb=700 + 2 * 600
    )


def test_every_server_of_an_engine_has_a_place_of_its_own_also_on_cpus() -> None:
    sglang = ["engine=sglang", "engine.replicas=3", "+policies.solver.own.engine.tp=2"]
    engines = [
        (workers.policy, workers.devices, workers.tp)
        for kind in ("CPU", "GPU")
        for workers in list_worker_groups(config("demo_math", *sglang), kind)
        if workers.part == "engine"
    ]
    assert engines == [("solver", 6, 2), ("verifier", 3, 1)] * 2
    elsewhere = config(
        "demo_math", "engine=sglang", "engine.python=null", "+engine.urls=['http://127.0.0.1:1']"
    )
    assert {workers.part for workers in list_worker_groups(elsewhere, "CPU")} == {"trainer"}


def test_samples_have_room_for_a_step_of_them_twice() -> None:
    assert object_store_mb(config("demo_math", "cluster.object_store_mb=300")) == 300
    assert object_store_mb(config("demo_math")) == 256
    # 32 x 8 trajectories of two agents, two loops each, 2048 + 2048 tokens of 72 bytes each (test_choose.py)
    assert (
        object_store_mb(config("drmas_t1_4b_shared_drmas")) == 2 * 72 * 1024 * 4096 // 2**20 == 576
    )


def test_experts_on_record_take_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    given = ["drmas_t1_4b_shared_drmas", f"policy_defaults.model={tmp_path}"]
    plain, replayed = config(*given), config(*given, "engine.router_replay=true")
    tokens, experts = 1024 * 4096, 48 * 8
    assert object_store_mb(replayed) == 2 * (72 + experts) * tokens // 2**20
    more = job_needs(replayed, "train", 8).memory_mb - job_needs(plain, "train", 8).memory_mb
    # of the store, and twice of the driver; ranks map the store's
    assert (
        more == object_store_mb(replayed) - object_store_mb(plain) + 2 * experts * tokens // 10**6
    )


def test_tasks_are_made_in_memory_for_their_files(tmp_path: Path) -> None:
    with (tmp_path / "deepcoder.jsonl").open("wb") as file:
        file.truncate(2 * 10**9)
    assert tasks_mb([]) == tasks_mb([tmp_path / "not here"]) == 1000
    assert tasks_mb([tmp_path / "deepcoder.jsonl"]) == 21_000


def test_programs_in_sandboxes_take_memory() -> None:
    code = config("strongermas_t1_code_single")
    plain = 16_000 + job_needs(code, "evaluate", 8).gpus * 6_000
    assert job_needs(code, "evaluate", 8).memory_mb == plain + 2_000


def test_a_run_on_gpus_asks_for_those_of_its_placement() -> None:
    run = config("drmas_t1_4b_shared_drmas")
    found = job_needs(run, "train", 8)
    placed = placement_of(run)
    ranks, engines = placed.layouts["shared"].ranks, placed.replicas * placed.engine_tp
    assert (found.nodes, found.gpus) == (1, ranks + engines)  # split: a GPU for each process
    together = job_needs(config("drmas_t1_4b_shared_drmas", "cluster.pool=shared"), "train", 8)
    assert together.gpus == max(ranks, engines)


def test_an_evaluation_asks_for_no_more_than_machines_have() -> None:
    """Four servers and more have a GPU each; on machines with fewer they share them."""
    run = config("unitymas_t3_hotpotqa_m_ask_7b")
    servers = len(run.models)
    assert [job_needs(run, "evaluate", gpus).gpus for gpus in (1, 2, 8)] == [
        1,
        2,
        8 // servers * servers,
    ]
    embedded = config(
        "demo_math", "+engine.device=cuda", "cluster.device=auto"
    )  # two ranks and one, and the engines
    assert job_needs(embedded, "evaluate", 8).gpus == 4


def test_what_does_not_fit_one_machine_gets_whole_ones() -> None:
    run = config("unitymas_t3_hotpotqa_m_ask_7b")  # 36 GPUs
    assert (job_needs(run, "train", 8).nodes, job_needs(run, "train", 8).gpus) == (5, 8)
    assert (job_needs(run, "train", 4).nodes, job_needs(run, "train", 4).gpus) == (9, 4)
    assert job_needs(run, "evaluate", 8).nodes == 1


def test_offloaded_trainers_and_weights_on_their_way_are_in_the_machines_memory() -> None:
    plain = config("drmas_t1_4b_shared_drmas", "engine.transport=distributed")
    (model,) = shapes_of(plain).values()
    disk = config("drmas_t1_4b_shared_drmas", "engine.transport=disk")
    more = job_needs(disk, "train", 8).memory_mb - job_needs(plain, "train", 8).memory_mb
    assert more == pytest.approx(
        2 * 2 * count_parameters(model) / 1e6, rel=0.01
    )  # old and new, two bytes each
    offloaded = job_needs(
        config(
            "drmas_t1_4b_shared_drmas",
            "engine.transport=distributed",
            "policies.shared.offload=true",
        ),
        "train",
        8,
    )
    # weights on two ranks and 12 bytes of optimizer state
    added = (2 * 2 + 12) * count_parameters(model) / 1e6
    assert offloaded.memory_mb - job_needs(plain, "train", 8).memory_mb == pytest.approx(
        added, rel=0.01
    )


def test_a_published_index_is_counted_as_it_lies_there(tmp_path: Path) -> None:
    folder = tmp_path / "wiki"
    there = config("demo_search", f"retriever.folder={folder}", "retriever.passages=null")
    assert job_needs(there, "retriever", 8).memory_mb == 1_000 + 80_000  # not here yet
    folder.mkdir()
    with (folder / "vectors").open("wb") as file:
        file.truncate(8_000_000_000)
    assert job_needs(there, "retriever", 8).memory_mb == 1_000 + 8_000 * 5 // 4 + 900


def test_an_index_of_the_runs_own_is_counted_by_its_corpus(tmp_path: Path) -> None:
    with (tmp_path / "c.jsonl").open("wb") as file:
        file.truncate(660 * 1_000_000)  # a million passages as long as wiki-18's
    own = config("demo_search", f"retriever.passages={tmp_path / 'c.jsonl'}")
    assert (
        job_needs(own, "retriever", 8).memory_mb == 1_000 + 900 + 1_536 * 5 // 4
    )  # of 384 float32
    more = config(
        "demo_search", f"retriever.passages={tmp_path / 'c.jsonl'}", "retriever.threads=4"
    )
    assert job_needs(more, "retriever", 8).cpus == 4
    assert job_needs(more, "train", 8).cpus == job_needs(own, "train", 8).cpus + 3
    words = config(
        "demo_search", f"retriever.passages={tmp_path / 'c.jsonl'}", "retriever.ranking=bm25"
    )
    assert job_needs(words, "retriever", 8).memory_mb == 1_000 + 900 + 3_600 * 5 // 4  # builds it
    small = config("demo_search")
    assert job_needs(small, "retriever", 8).memory_mb == 1_000 + 900
    more_mb = [
        job_needs(run, "train", 8).memory_mb - job_needs(small, "train", 8).memory_mb
        for run in (own, words)
    ]
    assert more_mb == [1_536 * 5 // 4, 600 * 5 // 4]
