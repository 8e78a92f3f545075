"""Policies that hold one frozen model together: who they are, what they take, and what is refused."""

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.planning.estimate import (
    Placement,
    estimate_run,
    memory_of_trainers,
    rank_sets,
    trainer_kinds,
)
from mcore_mas.planning.memory import GPUS, adapter_parameters, count_parameters
from mcore_mas.planning.worker_groups import list_worker_groups
from rollout.models.architecture import planned_architecture
from rollout.models.layout import ParallelLayout

POLICIES = ("solver", "verifier")
SHARED = [f"+policies.{name}.share_base=true" for name in POLICIES]
LORA = [f"+policies.{name}.lora={{rank: 16, alpha: 32}}" for name in POLICIES]


def config(*overrides: str) -> RunConfig:
    return RunConfig.check(
        resolve(["experiment=demo_math", "policies.solver.tp=1", *overrides]), "a test"
    )


def test_they_take_the_ranks_of_the_first_for_trainers_and_critics() -> None:
    critic = [
        "+policies.verifier.critic.lr=1e-3",
        "policies.solver.tp=2",
        "+policies.verifier.tp=2",
    ]
    apart, together = config(*LORA, *critic), config(*LORA, *critic, *SHARED)
    assert [(t.policy, t.part, t.devices) for t in list_worker_groups(apart, "GPU")] == [
        ("solver", "trainer", 2),
        ("verifier", "trainer", 2),
        ("verifier", "critic", 2),
    ]
    assert [(t.policy, t.part, t.devices) for t in list_worker_groups(together, "GPU")] == [
        ("solver", "trainer", 2)
    ]
    # and a CPU for the embedded engine, in which both adapters are
    assert [(t.policy, t.part) for t in list_worker_groups(together, "CPU")] == [
        ("solver", "trainer"),
        ("solver", "engine"),
    ]
    assert rank_sets(apart, POLICIES) == [
        [("solver", "trainer")],
        [("verifier", "trainer")],
        [("verifier", "critic")],
    ]
    assert rank_sets(together, POLICIES) == [
        [("solver", "trainer"), ("verifier", "trainer"), ("verifier", "critic")]
    ]
    assert (together.holder("solver"), together.holder("verifier")) == ("solver", "solver")


def test_the_plan_counts_the_frozen_model_once() -> None:
    a, layout = planned_architecture("Qwen3-4B"), ParallelLayout()
    models = dict.fromkeys(POLICIES, a)
    placement = Placement(
        pool="split", layouts=dict.fromkeys(POLICIES, layout), replicas=1, engine_tp=1, tokens=4096
    )
    sizes = {}
    for name, overrides in {"apart": LORA, "together": [*LORA, *SHARED]}.items():
        run = config(*overrides, *(f"+policies.{name}.bf16=true" for name in POLICIES))
        held = memory_of_trainers(run, models, placement)
        sizes[name] = [held[policy, "trainer"].weights for policy in POLICIES]
        assert trainer_kinds(run, "verifier", placement)["trainer"].on_base == (name == "together")
    base, adapter = (
        2 * count_parameters(a),
        2 * adapter_parameters(a, layout, config(*LORA).policies["solver"].lora),
    )
    assert sizes["apart"] == [base + adapter, base + adapter]
    assert sizes["together"] == [base + adapter, adapter]
    shared = config(*LORA, *SHARED)
    one, both = (
        estimate_run(run, models, placement, GPUS["H100"]).update for run in (config(*LORA), shared)
    )
    own = memory_of_trainers(shared, models, placement)["verifier", "trainer"]
    assert both - one == pytest.approx(own.kept)  # the activations are of one at a time


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            SHARED,
            "policies.solver: share_base is of trained adapters on a frozen model, and all of its wei",
        ),
        (
            [*LORA, SHARED[1]],
            r"policies.verifier: share_base: no other policy with it has model \S+; leave",
        ),
        (
            [*LORA, *SHARED, "policies.verifier.model=other"],
            "policies.solver: share_base: no other policy with it has",
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
            "policies.verifier: share_base .*nothing trains it",
        ),
        (
            [
                *[*LORA, *SHARED, "cluster.address=auto", "cluster.cpus=null"],
                "+cluster.nodes={solver: {train: big}, verifier: {train: small}}",
            ],
            "cluster.nodes.verifier: share_base puts it on the nodes of 'solver'; give both the same ones",
        ),
        (
            [*LORA, *SHARED, "+policies.verifier.own.engine={slots: 3}"],
            "policies.verifier.own.engine: share_base puts it in the engine of 'solver', whose settings are others",
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
def test_what_cannot_be_shared_is_refused_in_a_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config(*overrides)
    assert "\n" not in str(caught.value)
