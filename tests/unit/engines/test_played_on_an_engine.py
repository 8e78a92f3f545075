"""A team on the embedded engine: the same step says the same again, and what is late leaves no row behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollout.config.agents import build_player
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.records.trajectory import Status, VersionSpan
from rollout.teams.collect import Deadlines
from tests.support.play import SEED, STEP, TASK, Adder, collect, make_team

TASKS = [replace(TASK, id=f"task {n}") for n in range(3)]


class Tokens:
    """A renderer for 64 tokens."""

    stop = (0,)

    def render(self, messages):
        return tuple(1 + byte % 63 for message in messages for byte in message.content.encode())

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    path = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(
        Qwen2Config(**sizes, **heads, tie_word_embeddings=True)
    ).eval().save_pretrained(path)
    return path


def team_on(engine):
    team = make_team(engine)
    agents = {
        name: replace(agent, sampling=replace(agent.sampling, max_tokens=12))
        for name, agent in team.agents.items()
    }
    return replace(team, agents=agents, policies={"p": build_player(engine, Tokens())})


async def twice(task, team, env):
    first = await team.act("a", said=f"{env.reset(task)} of {task.id}")
    await team.act("b", said=first.text)
    await env.step("1")


def play(engine, *, tasks=TASKS, step=STEP, group_size=2, **options):
    async def run():
        groups = await collect(
            tasks,
            team_on(engine),
            Adder,
            twice,
            group_size=group_size,
            seed=SEED,
            step=step,
            **options,
        )
        while engine.core.has_work:  # what was aborted is handed out once more
            await asyncio.sleep(0)
        return groups

    return {
        trajectory.id: trajectory
        for group in asyncio.run(run())
        for trajectory in group.trajectories
    }


def said(played):
    return {
        name: [turn.completion_ids for turn in trajectory.turns]
        for name, trajectory in played.items()
    }


def test_a_repeated_step_says_the_same_whoever_else_plays(model):
    whole = play(LocalEngine(EmbeddedEngine.from_folder(model, max_length=128, rows=64)))
    again = play(LocalEngine(EmbeddedEngine.from_folder(model, max_length=128, rows=64)))
    assert said(again) == said(whole)
    # one task of the three, one row for all: other batches, other caches, the same tokens
    few = play(
        LocalEngine(EmbeddedEngine.from_folder(model, max_length=128, rows=1)), tasks=TASKS[1:2]
    )
    assert said(few) == {name: tokens for name, tokens in said(whole).items() if name in few}
    gaps = [
        abs(a - b)
        for name in few
        for one, other in zip(few[name].turns, whole[name].turns, strict=True)
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
    ]
    assert max(gaps) < 1e-4  # sums in another order
    other_step = play(
        LocalEngine(EmbeddedEngine.from_folder(model, max_length=128, rows=64)), step=STEP + 1
    )
    assert not set(map(str, said(other_step).values())) & set(map(str, said(whole).values()))


def test_what_is_late_leaves_no_row_of_the_engine_occupied(model):
    engine = LocalEngine(EmbeddedEngine.from_folder(model, max_length=128, rows=4))
    played = play(engine, deadlines=Deadlines(batch_s=0.002))
    assert Status.ABORTED in {trajectory.status for trajectory in played.values()}
    assert not engine.core.has_work
    assert not engine.open_requests()
    assert {trajectory.status for trajectory in play(engine, tasks=TASKS[:1]).values()} == {
        Status.COMPLETED
    }


def test_a_turn_records_which_weights_sampled_which_of_its_tokens(model):
    engine = LocalEngine(EmbeddedEngine.from_folder(model, max_length=128, rows=4))

    async def run():
        playing = asyncio.create_task(
            collect(TASKS[:1], team_on(engine), Adder, twice, group_size=1, seed=SEED, step=STEP)
        )
        while engine.core.stats.decode_tokens < 3:
            await asyncio.sleep(0)
        weights = Qwen2ForCausalLM.from_pretrained(model).state_dict()
        await engine.load_weights(weights.items(), 7)
        return await playing

    [group] = asyncio.run(run())
    first, second = group.trajectories[0].turns
    size = len(first.completion_ids)
    assert first.versions == (
        VersionSpan(version=0, start=0, end=3),
        VersionSpan(version=7, start=3, end=size),
    )
    assert (first.policy_version, first.oldest_version) == (7, 0)
    assert (second.policy_version, second.oldest_version) == (7, 7)
