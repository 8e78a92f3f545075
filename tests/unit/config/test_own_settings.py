"""Settings of one policy for its engine, loss and updates, which replace those of the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.config.run_sections import for_policy, schedule_length
from mcore_mas.credit.samples import Sample
from mcore_mas.megatron.batch import CostModel
from mcore_mas.planning.worker_groups import list_worker_groups
from mcore_mas.runtime.engine_factory import engine_requests
from mcore_mas.runtime.trainer_specs import policy_spec
from mcore_mas.training.policy_trainer import PolicyTrainer
from rollout.engines.sglang.build import sglang_settings

VERIFIER_OVERRIDES = [
    "policies.verifier.overrides.loss={options: {clip_high: 0.28}, kl: {coef: 0.1}, entropy: 0.01}",
    "policies.verifier.overrides.engine={max_length: 256, slots: 8}",
    "policies.verifier.overrides.trainer={microbatch_tokens: 1024, updates_per_step: 4}",
]


def config(*overrides: str) -> RunConfig:
    return RunConfig.from_values(
        resolve(["experiment=demo_math", "engine.max_length=512", *overrides]), "a test"
    )


def test_settings_of_a_policy_replace_those_of_the_run() -> None:
    run = config(*VERIFIER_OVERRIDES)
    solver = for_policy(run, "solver")
    verifier = for_policy(run, "verifier")
    assert solver == run
    assert verifier.loss.options == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert verifier.loss.kl.coef == 0.1
    assert verifier.loss.kl.where == "loss"
    assert verifier.loss.entropy == 0.01
    assert verifier.engine.max_length == 256
    assert verifier.engine.slots == 8
    assert verifier.engine.name == "embedded"
    assert verifier.trainer.microbatch_tokens == 1024
    assert verifier.trainer.steps == run.trainer.steps
    assert schedule_length(run, "solver") == 100
    assert schedule_length(run, "verifier") == 400
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
def test_a_server_that_will_sleep_starts_with_the_memory_saver(
    settings: list[str], saves: bool | None, tmp_path: Path
) -> None:
    run = config("engine=sglang", *settings)
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    (request,) = engine_requests(run, {"solver": tmp_path}, tmp_path, trained=True)
    assert sglang_settings(request).options.get("enable-memory-saver") is saves


def test_a_trainer_that_broadcasts_to_servers_has_their_nccl_setting() -> None:
    settings = [
        "engine=sglang",
        "cluster.pool=split",
        "+policies.verifier.overrides.engine.transport=disk",
        "+engine.transport=distributed",
    ]
    run = config(*settings)
    assert policy_spec("solver", run).cumem == "0"
    assert policy_spec("verifier", run).cumem is None
    # With each of these settings, SGLang's servers enable NCCL's cuMem.
    for setting in (
        "+engine.environment.NCCL_CUMEM_ENABLE='1'",
        "+engine.options.enable_symm_mem=true",
        "+engine.options.moe-a2a-backend=deepep_v2",
    ):
        assert policy_spec("solver", config(*settings, setting)).cumem == "1"


def samples_of_two_policies(**fields: Any) -> list[Sample]:
    """Return eight samples of each policy, each of another task."""
    samples = []
    for policy in ("solver", "verifier"):
        for i in range(8):
            defaults: dict[str, Any] = {"prompt_ids": (10 + i,), "completion_ids": (2, 3)}
            samples.append(
                Sample(
                    policy=policy,
                    agent=policy,
                    task=str(i),
                    trajectory=str(i),
                    turn=0,
                    **{**defaults, **fields},
                )
            )
    return samples


def test_clips_kl_micro_batches_and_updates_reach_each_policys_trainer() -> None:
    """The ranks and the policy trainer of each of two policies get the policy's settings."""
    run = config(
        VERIFIER_OVERRIDES[1],
        "policies.verifier.overrides.loss={name: gspo, aggregation: seq_mean_token_mean, "
        "kl: {coef: 0.1, estimate: k3}}",
        "policies.verifier.overrides.trainer={microbatch_tokens: 1024, minibatch: 4, passes: 2}",
        "policies.verifier.clip_grad=0.5",
        "policies.verifier.schedule=constant",
    )
    solver = policy_spec("solver", run)
    verifier = policy_spec("verifier", run)
    assert (solver.clip_grad, verifier.clip_grad) == (1.0, 0.5)
    assert (solver.objective.loss, verifier.objective.loss) == ("ppo_clip", "gspo")  # type: ignore[union-attr]
    solver_kl = for_policy(run, "solver").loss.kl
    verifier_kl = for_policy(run, "verifier").loss.kl
    assert (solver_kl.coef, solver_kl.estimate) == (0.0, "k3")
    assert (verifier_kl.coef, verifier_kl.estimate) == (0.1, "k3")

    samples = samples_of_two_policies(completion_ids=(2,) * 300)
    group: Any = SimpleNamespace(cost_model=CostModel())
    solver_parts = PolicyTrainer("solver", run, group).make_batches(samples, 0)
    verifier_parts = PolicyTrainer("verifier", run, group).make_batches(samples, 0)
    assert [len(part.samples) for part in solver_parts] == [8]
    assert [len(part.samples) for part in verifier_parts] == [4, 4]
    # A sample has 300 tokens: all eight fit in a micro-batch of the solver, and three in 1024 tokens.
    solver_sizes = [len(batch.token_ids) for batch in solver_parts[0].packed.microbatches]
    verifier_sizes = [len(batch.token_ids) for batch in verifier_parts[0].packed.microbatches]
    assert max(solver_sizes) == 2400
    assert max(verifier_sizes) == 900


def test_another_loss_does_not_get_the_options_of_the_runs_loss() -> None:
    run = config("policies.solver.overrides.loss={name: gspo, aggregation: seq_mean_token_mean}")
    loss = for_policy(run, "solver").loss
    assert loss.name == "gspo"
    assert loss.options == {}
    assert loss.aggregation == "seq_mean_token_mean"


def test_the_samples_of_each_policy_are_split_into_its_updates() -> None:
    run = config(*VERIFIER_OVERRIDES)
    samples = samples_of_two_policies()
    group: Any = SimpleNamespace(cost_model=SimpleNamespace(spread=False))
    for policy, sizes, entropy_coef in (
        ("solver", [8], 0.0),
        ("verifier", [2, 2, 2, 2], 0.01),
    ):
        parts = PolicyTrainer(policy, run, group).make_batches(samples, 0)
        assert [len(part.samples) for part in parts] == sizes
        for part in parts:
            assert {sample.entropy_coef for sample in part.samples} == {entropy_coef}


def engine_devices(run: RunConfig) -> list[tuple[str, int]]:
    """Return the policy and the number of GPUs of each engine."""
    groups = list_worker_groups(run, "GPU")
    return [(group.policy, group.devices) for group in groups if group.part == "engine"]


def test_each_policy_has_its_own_engine() -> None:
    run = config(*VERIFIER_OVERRIDES, "policies.verifier.bf16=true")
    models = {policy: policy for policy in run.policies}
    requests = engine_requests(run, models, Path("log"), trained=False)
    assert [
        (request.policies, request.config.slots, request.config.max_length, request.bf16)
        for request in requests
    ] == [(["solver"], 192, 512, False), (["verifier"], 8, 256, True)]
    servers = config(
        "engine.name=sglang",
        "engine.python=python",
        "policies.verifier.overrides.engine={tp: 2, replicas: 3}",
    )
    assert engine_devices(servers) == [("solver", 1), ("verifier", 6)]


def test_a_policy_may_have_another_engine_than_the_run() -> None:
    run = config(
        "policies.verifier.overrides.engine={name: sglang, urls: ['http://127.0.0.1:1'], options: {dtype: half}}"
    )
    models = {policy: policy for policy in run.policies}
    requests = engine_requests(run, models, Path("log"), trained=False)
    assert [(request.config.name, request.config.urls) for request in requests] == [
        ("embedded", ()),
        ("sglang", ("http://127.0.0.1:1",)),
    ]
    assert run.precision_of("solver") == "float32"
    assert run.precision_of("verifier") == "bfloat16"


@pytest.mark.parametrize(
    ("overrides", "precision"),
    [
        (["+policies.solver.bf16=true"], "bfloat16"),
        (
            [
                "+policies.solver.layers=te",
                "+policies.solver.bf16=true",
                "+policies.solver.fp8=hybrid",
            ],
            "float8",
        ),
        (["engine=sglang", "engine.python=/x", "+engine.options.quantization=fp8"], "float8"),
    ],
)
def test_the_lower_precision_of_trainer_and_engine_bounds_their_agreement(
    overrides: list[str], precision: str
) -> None:
    run = config(*overrides)
    assert run.precision_of("solver") == precision
    assert run.loss.correction.name == "tis"


def test_an_embedded_engine_does_not_get_the_settings_of_the_runs_servers() -> None:
    run = config(
        "engine.name=sglang",
        "engine.python=python",
        "engine.options={dtype: half}",
        "engine.transport=disk",
        "engine.tp=2",
        "+engine.compare_servers=false",
        "+engine.timeout_s=5",
        "cluster.device=auto",
        "policies.verifier.overrides.engine={name: embedded, device: cuda}",
    )
    engine = for_policy(run, "verifier").engine
    assert engine.name == "embedded"
    assert engine.python is None
    assert engine.options == {}
    assert engine.transport is None
    assert (engine.tp, engine.compare_servers, engine.timeout_s) == (1, True, None)
    assert engine_devices(run) == [("solver", 2), ("verifier", 1)]


def test_a_policy_with_servers_of_its_own_inherits_their_sizes_and_deadlines() -> None:
    run = config(
        "engine.name=sglang",
        "engine.python=python",
        "engine.tp=2",
        "+engine.timeout_s=5",
        "policies.verifier.overrides.engine={name: sglang, urls: ['http://127.0.0.1:1']}",
    )
    engine = for_policy(run, "verifier").engine
    assert (engine.python, engine.tp, engine.timeout_s) == (None, 2, 5.0)


def test_the_embedded_engine_of_a_policy_refuses_settings_of_servers() -> None:
    message = (
        r"policies\.verifier\.overrides\.engine: tp: only for SGLang's servers, and name is 'embedded'; "
        r"set name: sglang, or leave this out"
    )
    with pytest.raises(ConfigError, match=message):
        config("policies.verifier.overrides.engine={tp: 2}")


def test_a_policys_transport_is_checked_against_the_pool() -> None:
    settings = ["engine.name=sglang", "engine.python=python", "cluster.pool=shared"]
    message = r"engine\.transport: distributed joins trainer and engine in an NCCL group"
    with pytest.raises(ConfigError, match=message):
        config(*settings, "policies.verifier.overrides.engine={transport: distributed}")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "trainer={steps: 3}",
            "trainer.steps cannot be overridden by a policy; expected microbatch_tokens, updates_per_step, ",
        ),
        ("engine={sleep: true}", "engine.sleep cannot be overridden by a policy"),
        ("engine={name: sglang}", "policies.verifier.overrides.engine: sglang needs python"),
        (
            "engine={name: sglang, urls: ['http://127.0.0.1:1'], transport: nope}",
            "sglang has no transport 'nope'",
        ),
        ("loss={clip: 0.1}", "loss.clip cannot be overridden by a policy"),
        (
            "loss={entropy: -1}",
            "policies.verifier.overrides.loss.entropy: Input should be greater than or equal to 0",
        ),
        (
            "engine={max_length: 24}",
            "agents.verifier.max_tokens 24 leaves no room for a prompt in engine.",
        ),
        (
            "engine={max_length: 8192}",
            "policies.verifier.overrides: trainer.microbatch_tokens 4096 has no room for one",
        ),
    ],
)
def test_settings_that_a_policy_cannot_have_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config(f"policies.verifier.overrides.{setting}")
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
