"""Every turn of a training can be sampled again from its record, with real sampling."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
from rollout.records.trajectory import Message, Trajectory, Turn
from rollout.sync.transport import SyncRoute, WeightUpdate
from tests.support.replay import sample_again
from tests.support.simulated import TOKEN_S, simulated_run, with_engines
from tests.support.simulated_training import written_trajectories
from tests.support.virtual_time import run_virtually

STEPS = 4
MAX_LENGTH = 320

# Seconds of an update by staleness; some are shorter and some longer than a collection.
UPDATE_S = {0: 5.0, 1: 2.0, 2: 7.0}

TrajectoriesByStaleness = dict[int, list[Trajectory]]


class Latin1Renderer:
    """Renderer whose tokens are bytes; 0 ends a reply."""

    stop = (0,)

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple("\n".join(message.content for message in messages).encode("latin-1"))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("latin-1")


@cache
def model_of(version: int) -> Qwen2ForCausalLM:
    """Return random weights that stand for a policy after `version` updates."""
    torch.manual_seed(version)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


class TimedEngine(LocalEngine):
    """Embedded engine whose tokens take `TOKEN_S` each; new weights sample the rest of a reply."""

    starts = 1
    pause_s = 0.0

    def __init__(self, folder: Path) -> None:
        core = EmbeddedEngine.from_folder(
            folder, max_length=MAX_LENGTH, rows=32, deterministic=True
        )
        super().__init__(core)

    async def begin_update(self) -> SyncRoute:
        return SyncRoute(transport="simulated", target="", model="")

    async def weights_lost(self) -> None:
        await asyncio.Event().wait()

    async def commit_update(self, update: WeightUpdate) -> None:
        weights = model_of(update.version).state_dict().items()
        await self.load_weights(weights, update.version)

    async def exchange(
        self, requests: list[Request], aborts: list[int]
    ) -> list[tuple[int, Outcome]]:
        await asyncio.sleep(TOKEN_S)
        return await super().exchange(requests, aborts)


def train(folder: Path, model: Path, staleness: int) -> TrainingSession:
    """Train the math team for `STEPS` steps."""
    session = simulated_run(
        folder,
        "trainer.tasks_per_step=2",
        "trainer.group_size=2",
        f"trainer.steps={STEPS}",
        f"+trainer.staleness={staleness}",
        # random text gets some of this reward, so that every step has an update
        "reward.name=tests.support.rewards:by_first_token",
        "~reward.penalties",
        seconds=lambda update: UPDATE_S[staleness],
    )
    engines = {policy: TimedEngine(model) for policy in session.config.policies}
    session = with_engines(session, engines, Latin1Renderer())
    run_virtually(train_steps(session, 0))
    return session


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model_of(0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory: pytest.TempPathFactory, model: Path) -> TrajectoriesByStaleness:
    """Return trajectories of three trainings."""
    folder = tmp_path_factory.mktemp("runs")
    result = {}
    for staleness in UPDATE_S:
        session = train(folder / str(staleness), model, staleness)
        result[staleness] = [
            trajectory
            for step in range(STEPS)
            for trajectory in written_trajectories(session, step)
        ]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("staleness", UPDATE_S)
def test_a_turn_is_sampled_again_to_the_bit_from_its_seed_and_versions(
    trajectories: TrajectoriesByStaleness, model: Path, staleness: int
) -> None:
    engine = EmbeddedEngine.from_folder(model, max_length=MAX_LENGTH, rows=1, deterministic=True)
    turns = [turn for trajectory in trajectories[staleness] for turn in trajectory.turns]
    for turn in turns:
        again = sample_again(engine, turn, lambda version: model_of(version).state_dict().items())
        assert again == (turn.completion_ids, turn.logprobs)
    assert len({turn.seed for turn in turns}) == len(turns)
    assert {span.version for turn in turns for span in turn.versions} >= {0, 1}
    # ahead of training, new weights arrive in the middle of some turns
    has_several_versions = any(len(turn.versions) > 1 for turn in turns)
    assert has_several_versions == (staleness > 0)


def test_the_same_weights_sample_the_same_whatever_runs_beside(
    trajectories: TrajectoriesByStaleness,
) -> None:
    """Turns that were collected ahead, in batches with other steps, equal those that were not."""

    def turns_of(staleness: int) -> dict[tuple[str, int], Turn]:
        return {
            (trajectory.id, turn.index): turn
            for trajectory in trajectories[staleness]
            for turn in trajectory.turns
        }

    on_policy = turns_of(0)
    compared = 0
    for staleness in (1, 2):
        ahead = turns_of(staleness)
        for key in on_policy.keys() & ahead.keys():
            turn = on_policy[key]
            other = ahead[key]
            assert turn.seed == other.seed
            if turn.versions == other.versions and turn.prompt_ids == other.prompt_ids:
                assert turn.completion_ids == other.completion_ids
                assert turn.logprobs == other.logprobs
                compared += 1
    assert compared >= 8  # the first version samples all of the first step
