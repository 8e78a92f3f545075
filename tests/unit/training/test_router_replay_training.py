"""Training of a mixture of experts in bfloat16, in which router replay brings the trainer closer to the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.credit.assign import add_advantages
from mcore_mas.credit.samples import to_samples
from mcore_mas.runtime.engine_factory import engine_requests
from mcore_mas.runtime.trainer_specs import policy_spec
from mcore_mas.training.policy_trainer import PolicyTrainer
from rollout.config.agents import build_player, build_team
from rollout.config.environment import build_env
from rollout.config.reward import build_allocator
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.build import embedded_settings
from rollout.records.files import read_trajectories, write_trajectories
from rollout.records.trajectory import Group as Played
from rollout.records.trajectory import Task
from tests.support.in_process import Bytes, Engine, Group
from tests.support.play import collect

TASK = Task(id="1", prompt="task 1", answers=("1",), env="math", source="s", split="train")
STEPS = 2


def make_mixture(folder: Path) -> Path:
    """Write a model with random weights over bytes, which routes a token to 2 of 8 experts with close scores."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(0.02)
    model.save_pretrained(folder)
    return folder


def run_config(folder: Path, model: Path, *overrides: str) -> RunConfig:
    values = resolve(
        [
            "experiment=demo_math",
            f"results={folder}",
            "orchestra.options.max_loops=1",
            "reward.name=tests.support.rewards:by_first_token",
            "~reward.penalties",
            *(f"policies.{policy}.model={model}" for policy in ("solver", "verifier")),
            "policies.solver.tp=1",
            "+policies.solver.bf16=true",
            *overrides,
        ]
    )
    return RunConfig.from_values(values, "a test")


def train_divergences(folder: Path, model: Path, replay: bool) -> list[float]:
    """Train on trajectories that are read back from a file; return the solver's KL(engine, trainer) of each step.

    Args:
        folder: folder of the trajectories.
        model: folder of the model.
        replay: value of `engine.router_replay`.
    """
    config = run_config(folder, model, f"engine.router_replay={str(replay).lower()}")
    (request,) = engine_requests(config, {"solver": model}, folder, trained=True)
    routing = embedded_settings(request).routing
    engine = Engine(EmbeddedEngine.from_folder(model, max_length=512, rows=8, routing=routing))
    player = build_player(engine, Bytes(), deadline_s=None, max_in_flight=None)
    team = build_team(config.agents, dict.fromkeys(config.policies, player))
    estimators = {name: config.advantage_of(name) for name in config.agents}
    group = Group(policy_spec("solver", config))
    trainer = PolicyTrainer("solver", config, group)  # type: ignore[arg-type]
    divergences = []
    for step in range(STEPS):
        played = collect(
            [TASK],
            team,
            build_env(config.env),
            config.orchestra.call,
            group_size=4,
            seed=1,
            step=step,
        )
        rewarded = list(map(build_allocator(config.reward, config.agents), asyncio.run(played)))
        write_trajectories(folder / f"{step}.parquet", rewarded[0].trajectories)
        samples = to_samples(
            [Played(task=TASK, trajectories=tuple(read_trajectories(folder / f"{step}.parquet")))]
        )
        assert all(bool(sample.routing) == replay for sample in samples)
        batches = trainer.make_batches(samples, step)
        metrics = asyncio.run(trainer.update(batches, add_advantages(samples, estimators), step))
        assert metrics["grad_norm"] > 0
        divergences.append(metrics["agent/solver/logprob_gap_k3"])
        asyncio.run(engine.load_weights(list(group.trainer.model.weights()), step + 1))
    return divergences


@pytest.mark.slow
def test_router_replay_reduces_the_divergence_of_trainer_and_engine(
    tmp_path: Path, one_rank: None
) -> None:
    model = make_mixture(tmp_path / "model")
    with_replay = train_divergences(tmp_path, model, replay=True)
    without_replay = train_divergences(tmp_path, model, replay=False)
    print(f"KL(engine, trainer) by step: {with_replay} with replay, {without_replay} without")
    for replayed, routed_again in zip(with_replay, without_replay, strict=True):
        assert routed_again > 5 * replayed


def test_a_remote_model_has_no_router_to_replay(tmp_path: Path) -> None:
    overrides = (
        "~policies.verifier",
        "+policies.verifier.remote={provider: openai, model: m}",
        "+policies.verifier.overrides.engine.router_replay=true",
    )
    with pytest.raises(
        ConfigError,
        match=r"overrides.engine.router_replay: a remote model does not report its experts",
    ):
        run_config(tmp_path, tmp_path, *overrides)
    remotes = [
        f"policies.{policy}={{remote: {{provider: openai, model: m}}}}"
        for policy in ("solver", "verifier")
    ]
    overrides = (
        "engine.router_replay=true",
        *(f"agents.{name}.loss_weight=0" for name in ("solver", "verifier")),
    )
    with pytest.raises(
        ConfigError, match=r"engine.router_replay: remote models do not report their experts"
    ):
        run_config(
            tmp_path, tmp_path, "~policies", *(f"+{remote}" for remote in remotes), *overrides
        )
