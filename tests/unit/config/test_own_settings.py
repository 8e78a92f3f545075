"""A policy's own settings of engine, loss and updates stand in for the run's, for it alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig, for_policy, updates_in_schedule
from mcore_mas.credit.samples import Sample
from mcore_mas.megatron.batch import CostModel
from mcore_mas.planning.worker_groups import list_worker_groups
from mcore_mas.runtime.engine_factory import engine_requests
from mcore_mas.runtime.trainer_specs import policy_spec
from mcore_mas.training.policy_trainer import PolicyTrainer
from rollout.engines.sglang.build import sglang_settings

OWN = [
    "policies.verifier.own.loss={options: {clip_high: 0.28}, kl: {coef: 0.1}, entropy: 0.01}",
    "policies.verifier.own.engine={max_length: 256, slots: 8}",
    "policies.verifier.own.trainer={microbatch_tokens: 1024, updates_per_step: 4}",
]


def config(*overrides: str) -> RunConfig:
    return RunConfig.check(
        resolve(["experiment=demo_math", "engine.max_length=512", *overrides]), "a test"
    )


def test_what_a_policy_sets_itself_is_its_own() -> None:
    run = config(*OWN)
    solver, verifier = (for_policy(run, name) for name in ("solver", "verifier"))
    assert solver == run
    assert verifier.loss.options == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert (verifier.loss.kl.coef, verifier.loss.kl.where, verifier.loss.entropy) == (
        0.1,
        "loss",
        0.01,
    )
    assert (verifier.engine.max_length, verifier.engine.slots, verifier.engine.name) == (
        256,
        8,
        "embedded",
    )
    assert (verifier.trainer.microbatch_tokens, verifier.trainer.steps) == (1024, run.trainer.steps)
    assert [updates_in_schedule(run, name) for name in ("solver", "verifier")] == [100, 400]
    specs = {name: policy_spec(name, run) for name in ("solver", "verifier")}
    assert {name: spec.objective.options["clip_high"] for name, spec in specs.items()} == {  # type: ignore[union-attr]
        "solver": 0.2,
        "verifier": 0.28,
    }
    assert specs["verifier"].decay_steps == 400


@pytest.mark.parametrize(
    ("settings", "saves"),
    [
        (["+engine.sleep=true"], True),
        ([], None),
        (["+engine.sleep=true", "+engine.options.device=cpu"], None),
        (["+engine.sleep=true", "+engine.options.enable-memory-saver=false"], False),
    ],
)
def test_a_server_that_is_to_sleep_is_started_so_that_it_can(
    settings: list[str], saves: bool | None, tmp_path: Path
) -> None:
    run = config("engine=sglang", *settings)
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    (request,) = engine_requests(run, {"solver": tmp_path}, tmp_path, trained=True)
    assert sglang_settings(request).options.get("enable-memory-saver") is saves


def test_a_trainer_that_broadcasts_to_servers_tells_nccl_what_they_tell_it() -> None:
    served = ["engine=sglang", "cluster.pool=split", "+policies.verifier.own.engine.transport=disk"]
    run = config(*served, "+engine.transport=distributed")
    assert [policy_spec(name, run).cumem for name in ("solver", "verifier")] == ["0", None]
    for said in (
        "engine.environment.NCCL_CUMEM_ENABLE='1'",
        "engine.options.enable_symm_mem=true",
        "engine.options.moe-a2a-backend=deepep_v2",
    ):
        assert (
            policy_spec(
                "solver", config(*served, "+engine.transport=distributed", f"+{said}")
            ).cumem
            == "1"
        )


def test_clips_kl_micro_batches_and_updates_reach_each_policys_trainer() -> None:
    """What a policy's ranks and its part of the step are given, of two policies of one run."""
    run = config(
        OWN[1],
        "policies.verifier.own.loss={name: gspo, aggregation: seq_mean_token_mean, kl: {coef: 0.1, estimate: k3}}",
        "policies.verifier.own.trainer={microbatch_tokens: 1024, minibatch: 4, passes: 2}",
        "policies.verifier.clip_grad=0.5",
        "policies.verifier.schedule=constant",
    )
    solver, verifier = (policy_spec(name, run) for name in ("solver", "verifier"))
    assert (solver.clip_grad, verifier.clip_grad) == (1.0, 0.5)
    assert (solver.objective.loss, verifier.objective.loss) == ("ppo_clip", "gspo")  # type: ignore[union-attr]
    kept = {name: for_policy(run, name) for name in run.policies}
    assert {name: (own.loss.kl.coef, own.loss.kl.estimate) for name, own in kept.items()} == {
        "solver": (0.0, "k3"),
        "verifier": (0.1, "k3"),
    }
    samples = [
        Sample(
            policy=name,
            agent=name,
            task=str(i),
            trajectory=str(i),
            turn=0,
            prompt_ids=(10 + i,),
            completion_ids=(2,) * 300,
        )
        for name in ("solver", "verifier")
        for i in range(8)
    ]
    group: Any = SimpleNamespace(cost_model=CostModel())
    parts = {
        name: PolicyTrainer(name, run, group).pack(samples, 0) for name in ("solver", "verifier")
    }
    assert {name: [len(part.samples) for part in own] for name, own in parts.items()} == {
        "solver": [8],
        "verifier": [4, 4],
    }
    sizes = {
        name: max(len(batch.token_ids) for batch in own[0].packed.microbatches)
        for name, own in parts.items()
    }
    assert sizes == {
        "solver": 2400,
        "verifier": 900,
    }  # of 300 tokens each: all eight, and three within 1024


def test_another_loss_takes_no_options_of_the_runs() -> None:
    loss = for_policy(
        config("policies.solver.own.loss={name: gspo, aggregation: seq_mean_token_mean}"), "solver"
    ).loss
    assert (loss.name, loss.options, loss.aggregation) == ("gspo", {}, "seq_mean_token_mean")


def test_each_policys_samples_are_split_into_its_own_updates() -> None:
    run = config(*OWN)
    samples = [
        Sample(
            policy=name,
            agent=name,
            task=str(i),
            trajectory=str(i),
            turn=0,
            prompt_ids=(1,),
            completion_ids=(2, 3),
        )
        for name in ("solver", "verifier")
        for i in range(8)
    ]
    group: Any = SimpleNamespace(cost_model=SimpleNamespace(spread=False))
    parts = {
        name: PolicyTrainer(name, run, group).pack(samples, 0) for name in ("solver", "verifier")
    }
    assert {name: [len(part.samples) for part in own] for name, own in parts.items()} == {
        "solver": [8],
        "verifier": [2, 2, 2, 2],
    }
    assert {sample.entropy_coef for part in parts["verifier"] for sample in part.samples} == {0.01}
    assert {sample.entropy_coef for part in parts["solver"] for sample in part.samples} == {0.0}


def test_each_policy_has_its_own_engine() -> None:
    run = config(*OWN, "policies.verifier.bf16=true")
    models = {policy: policy for policy in run.policies}
    requests = engine_requests(run, models, Path("log"), trained=False)
    assert [
        (request.policies, request.config.slots, request.config.max_length, request.bf16)
        for request in requests
    ] == [(["solver"], 192, 512, False), (["verifier"], 8, 256, True)]
    servers = config(
        "engine.name=sglang",
        "engine.python=python",
        "policies.verifier.own.engine={tp: 2, replicas: 3}",
    )
    taken = [
        (t.policy, t.devices) for t in list_worker_groups(servers, "GPU") if t.part == "engine"
    ]
    assert taken == [("solver", 1), ("verifier", 6)]


def test_a_policy_may_have_another_engine_than_the_run() -> None:
    mixed = config(
        "policies.verifier.own.engine={name: sglang, urls: ['http://127.0.0.1:1'], options: {dtype: half}}"
    )
    models = {policy: policy for policy in mixed.policies}
    requests = engine_requests(mixed, models, Path("log"), trained=False)
    assert [(request.config.name, request.config.urls) for request in requests] == [
        ("embedded", ()),
        ("sglang", ("http://127.0.0.1:1",)),
    ]
    assert (mixed.precision_of("solver"), mixed.precision_of("verifier")) == ("float32", "bfloat16")

    servers = [
        "engine.name=sglang",
        "engine.python=python",
        "engine.options={dtype: half}",
        "engine.transport=disk",
    ]
    other_way = config(
        *servers,
        "cluster.device=auto",
        "policies.verifier.own.engine={name: embedded, device: cuda}",
    )
    own = for_policy(other_way, "verifier").engine
    assert (own.name, own.python, own.options, own.transport) == (
        "embedded",
        None,
        {},
        None,
    )  # nothing of SGLang's
    taken = [
        (t.policy, t.devices) for t in list_worker_groups(other_way, "GPU") if t.part == "engine"
    ]
    assert taken == [("solver", 1), ("verifier", 1)]
    with pytest.raises(
        ConfigError,
        match=r"engine\.transport: distributed joins trainer and engine in an NCCL group",
    ):
        shared = ["engine.name=sglang", "engine.python=python", "cluster.pool=shared"]
        config(*shared, "policies.verifier.own.engine={transport: distributed}")


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            "trainer={steps: 3}",
            "trainer.steps is the run's; a policy's own can be microbatch_tokens, updates_per_step, ",
        ),
        ("engine={sleep: true}", "engine.sleep is the run's"),
        ("engine={name: sglang}", "policies.verifier.own.engine: sglang needs python"),
        (
            "engine={name: sglang, urls: ['http://127.0.0.1:1'], transport: nope}",
            "sglang has no transport 'nope'",
        ),
        ("loss={clip: 0.1}", "loss.clip is the run's"),
        (
            "loss={entropy: -1}",
            "policies.verifier.own.loss.entropy: Input should be greater than or equal to 0",
        ),
        (
            "engine={max_length: 24}",
            "agents.verifier.max_tokens 24 leaves no room for a prompt in engine.",
        ),
        (
            "engine={max_length: 8192}",
            "policies.verifier.own: trainer.microbatch_tokens 4096 has no room for one",
        ),
    ],
)
def test_what_cannot_be_a_policys_own_is_refused(own: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(f"policies.verifier.own.{own}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
