"""Policies that share one frozen base model: their ranks, their memory, and settings that are refused."""

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.planning.estimate import (
    estimate_peak_memory,
    estimate_trainers,
    trainers_by_ranks,
)
from mcore_mas.planning.gpus import GPUS
from mcore_mas.planning.memory import count_adapter_parameters, count_parameters
from mcore_mas.planning.worker_groups import list_worker_groups
from rollout.models.layout import ParallelLayout
from rollout.models.published_shapes import planned_architecture

POLICIES = ("solver", "verifier")
SHARED = [f"+policies.{name}.share_base=true" for name in POLICIES]
LORA = [f"+policies.{name}.lora={{rank: 16, alpha: 32}}" for name in POLICIES]


def config(*overrides: str) -> RunConfig:
    return RunConfig.from_values(
        resolve(["experiment=demo_math", "policies.solver.tp=1", *overrides]), "a test"
    )


def test_policies_that_share_a_base_use_the_ranks_of_the_first() -> None:
    settings = [
        "+policies.verifier.critic.lr=1e-3",
        "policies.solver.tp=2",
        "+policies.verifier.tp=2",
        "+engine.device=cpu",
    ]
    separate = config(*LORA, *settings)
    shared = config(*LORA, *settings, *SHARED)
    separate_groups = list_worker_groups(separate, "GPU")
    assert [(group.policy, group.part, group.devices) for group in separate_groups] == [
        ("solver", "trainer", 2),
        ("verifier", "trainer", 2),
        ("verifier", "critic", 2),
    ]
    shared_groups = list_worker_groups(shared, "GPU")
    assert [(group.policy, group.part, group.devices) for group in shared_groups] == [
        ("solver", "trainer", 2)
    ]
    # On CPUs, the embedded engine needs a device too. It has the adapters of both policies.
    assert [(group.policy, group.part) for group in list_worker_groups(shared, "CPU")] == [
        ("solver", "trainer"),
        ("solver", "engine"),
    ]
    assert trainers_by_ranks(separate) == [
        [("solver", "trainer")],
        [("verifier", "trainer")],
        [("verifier", "critic")],
    ]
    assert trainers_by_ranks(shared) == [
        [("solver", "trainer"), ("verifier", "trainer"), ("verifier", "critic")]
    ]
    assert shared.holder("solver") == "solver"
    assert shared.holder("verifier") == "solver"


def test_the_plan_counts_the_frozen_model_once() -> None:
    architecture = planned_architecture("Qwen3-4B")
    models = dict.fromkeys(POLICIES, architecture)
    bf16 = [f"+policies.{name}.bf16=true" for name in POLICIES]
    separate = config(*LORA, *bf16)
    shared = config(*LORA, *SHARED, *bf16)

    lora = separate.policies["solver"].lora
    base = 2 * count_parameters(architecture)
    adapter = 2 * count_adapter_parameters(architecture, ParallelLayout(), lora)
    separate_weights = [memory.weights for memory in estimate_trainers(separate, models).values()]
    shared_weights = [memory.weights for memory in estimate_trainers(shared, models).values()]
    assert separate_weights == [base + adapter, base + adapter]
    assert shared_weights == [base + adapter, adapter]

    # The trainers that share a rank add up, but only one of them has activations at a time.
    verifier = estimate_trainers(shared, models)["verifier", "trainer"]
    separate_update = estimate_peak_memory(separate, models, GPUS["H100"]).update
    shared_update = estimate_peak_memory(shared, models, GPUS["H100"]).update
    assert shared_update - separate_update == pytest.approx(verifier.persistent)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            SHARED,
            "policies.solver: share_base is for policies that train adapters on a frozen model, and this policy "
            "trains all weights; add policies.solver.lora, or leave share_base out",
        ),
        (
            [*LORA, SHARED[1]],
            r"policies.verifier: share_base: no other policy with share_base has model \S+; leave",
        ),
        (
            [*LORA, *SHARED, "policies.verifier.model=other"],
            "policies.solver: share_base: no other policy with share_base has",
        ),
        (
            [*LORA, *SHARED, "policies.solver.tp=2"],
            "policies.verifier: share_base puts it on the ranks of 'solver', whose tp is 2 and not 1; make them equal",
        ),
        (
            [*LORA, *SHARED, "+policies.solver.bf16=true"],
            "on the ranks of 'solver', whose bf16 is True and not False",
        ),
        (
            [*LORA, *SHARED, "+agents.verifier.loss_weight=0"],
            "policies.verifier: share_base .*nothing trains this policy",
        ),
        (
            [
                *[*LORA, *SHARED, "cluster.address=auto", "cluster.cpus=null"],
                "+cluster.nodes={solver: {train: big}, verifier: {train: small}}",
            ],
            "cluster.nodes.verifier: share_base puts it on the nodes of 'solver'; give both the same ones",
        ),
        (
            [*LORA, *SHARED, "+policies.verifier.overrides.engine={slots: 3}"],
            "policies.verifier.overrides.engine: share_base puts the policy into the engine of 'solver', "
            "whose settings differ",
        ),
        (
            [*LORA, *SHARED, "+engine.replicas=2"],
            "policies.solver: share_base keeps adapters in one actor of the emb",
        ),
        (
            [*LORA, *SHARED, "+engine.transport=disk"],
            "policies.solver: share_base keeps adapters in one act",
        ),
        ([*LORA, "+policies.solver.share_base=maybe"], "policies.solver.share_base"),
    ],
)
def test_policies_that_cannot_share_a_base_are_refused_in_one_line(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config(*overrides)
    assert "\n" not in str(caught.value)
