"""A training whose team plays on embedded engines: every turn can be sampled again from what was written down of it."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from mcore_mas.training.loop import train_steps
from mcore_mas.training.step import TrainingSession
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.engines.embedded.requests import Outcome, Request
from rollout.records.files import read_trajectories
from rollout.records.trajectory import Trajectory
from rollout.sync.transport import SyncRoute, WeightUpdate
from tests.support.replay import sample_again
from tests.support.simulated import TOKEN_S, simulated_run, with_engines
from tests.support.virtual_time import run_virtually

STEPS, LENGTH = 4, 320


class Bytes:
    """A renderer whose tokens are bytes; 0 ends a reply."""

    stop = (0,)

    def render(self, messages):
        return tuple("\n".join(m.content for m in messages).encode("latin-1"))

    def decode(self, token_ids):
        return bytes(token_ids).decode("latin-1")


@cache
def weights(version: int) -> Qwen2ForCausalLM:
    """What a policy is after so many updates."""
    torch.manual_seed(version)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True)).eval()


class TimedEngine(LocalEngine):
    """The embedded engine, whose every token takes `TOKEN_S`; weights that arrive meanwhile sample the rest."""

    starts, pause_s = 1, 0.0

    def __init__(self, folder: Path) -> None:
        core = EmbeddedEngine.from_folder(folder, max_length=LENGTH, rows=32, deterministic=True)
        super().__init__(core)

    async def begin_update(self) -> SyncRoute:
        return SyncRoute(transport="simulated", target="", model="")

    async def weights_lost(self) -> None:
        await asyncio.Event().wait()

    async def commit_update(self, update: WeightUpdate) -> None:
        await self.load_weights(weights(update.version).state_dict().items(), update.version)

    async def exchange(
        self, requests: list[Request], aborts: list[int]
    ) -> list[tuple[int, Outcome]]:
        await asyncio.sleep(TOKEN_S)
        return await super().exchange(requests, aborts)


def train(folder: Path, model: Path, staleness: int, *, update_s: float) -> TrainingSession:
    """Train `STEPS` steps of the math team on engines whose sampling is real."""
    run = simulated_run(
        folder,
        "trainer.tasks_per_step=2",
        "trainer.group_size=2",
        f"trainer.steps={STEPS}",
        f"+trainer.staleness={staleness}",
        "reward.name=tests.support.rewards:by_first_token",  # random text gets some of it: every step is an update
        "~reward.penalties",
        seconds=lambda _: update_s,
    )
    engines = {policy: TimedEngine(model) for policy in run.config.policies}
    run = with_engines(run, engines, Bytes())
    run_virtually(train_steps(run, 0))
    return run


def played(run: TrainingSession) -> list[Trajectory]:
    return [
        trajectory
        for step in range(STEPS)
        for trajectory in read_trajectories(
            run.rollouts.collected.folder / f"step_{step:06d}.parquet"
        )
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    weights(0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model):
    """The trajectories of three trainings by their staleness; one updates faster than it collects."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        n: played(train(folder / str(n), model, n, update_s=s))
        for n, s in ((0, 5.0), (1, 2.0), (2, 7.0))
    }


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_every_turn_is_sampled_again_to_the_bit_from_its_seed_and_versions(runs, model, staleness):
    alone = EmbeddedEngine.from_folder(model, max_length=LENGTH, rows=1, deterministic=True)
    turns = [turn for trajectory in runs[staleness] for turn in trajectory.turns]
    for turn in turns:
        found = sample_again(alone, turn, lambda version: weights(version).state_dict().items())
        assert found == (turn.completion_ids, turn.logprobs)
    assert len({turn.seed for turn in turns}) == len(
        turns
    )  # by run, step, task, sample, agent and turn
    assert {span.version for turn in turns for span in turn.versions} >= {0, 1}
    straddling = any(len(turn.versions) > 1 for turn in turns)
    assert straddling == (staleness > 0)  # ahead of training, weights came in the middle of some


def test_the_same_weights_say_the_same_whatever_runs_beside(runs):
    """Collected ahead, with other steps in the same batches, or not."""
    plain, *others = (
        {(t.id, turn.index): turn for t in runs[n] for turn in t.turns} for n in (0, 1, 2)
    )
    compared = 0
    for other in others:
        for place in plain.keys() & other.keys():
            one, two = plain[place], other[place]
            assert one.seed == two.seed
            if (one.versions, one.prompt_ids) == (two.versions, two.prompt_ids):
                assert (one.completion_ids, one.logprobs) == (two.completion_ids, two.logprobs)
                compared += 1
    assert compared >= 8  # the first step's are all by the first weights
