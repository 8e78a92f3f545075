"""Teams on the embedded engine: repeated steps sample the same tokens, and late requests end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from transformers import Qwen2ForCausalLM

from rollout.config.agents import build_player
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.records.trajectory import Status, VersionSpan
from rollout.teams.collect import Deadlines
from tests.support.play import SEED, STEP, TASK, Adder, collect, make_team

TASKS = [replace(TASK, id=f"task {number}") for number in range(3)]


class Tokens:
    """Renderer for a vocabulary of 64 tokens."""

    stop = (0,)

    def render(self, messages):
        return tuple(1 + byte % 63 for message in messages for byte in message.content.encode())

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))


def make_engine(folder, *, rows):
    return LocalEngine(EmbeddedEngine.from_folder(folder, max_length=128, rows=rows))


def make_team_on(engine):
    """Return the team of `play` with replies of 12 tokens, on an engine."""
    team = make_team(engine)
    agents = {
        name: replace(agent, sampling=replace(agent.sampling, max_tokens=12))
        for name, agent in team.agents.items()
    }
    return replace(team, agents=agents, policies={"p": build_player(engine, Tokens())})


async def two_turns(task, team, env):
    """Play a reply of agent a to the task, and a reply of agent b to agent a."""
    first = await team.act("a", said=f"{env.reset(task)} of {task.id}")
    await team.act("b", said=first.text)
    await env.step("1")


def play(engine, *, tasks=TASKS, step=STEP, group_size=2, **options):
    """Return the trajectories of a step, by id."""

    async def run():
        groups = await collect(
            tasks,
            make_team_on(engine),
            Adder,
            two_turns,
            group_size=group_size,
            seed=SEED,
            step=step,
            **options,
        )
        while engine.core.has_work:  # the engine ends aborted requests in its next exchange
            await asyncio.sleep(0)
        return groups

    groups = asyncio.run(run())
    return {trajectory.id: trajectory for group in groups for trajectory in group.trajectories}


def replies(trajectories):
    """Return the sampled tokens of every turn, by trajectory."""
    return {
        name: [turn.completion_ids for turn in trajectory.turns]
        for name, trajectory in trajectories.items()
    }


def logprobs(trajectories):
    """Return the log-probabilities of all turns in one list, in the order of trajectories."""
    return [
        logprob
        for name in sorted(trajectories)
        for turn in trajectories[name].turns
        for logprob in turn.logprobs
    ]


def test_a_repeated_step_samples_the_same_tokens_in_other_batches(qwen2):
    all_tasks = play(make_engine(qwen2, rows=64))
    repeated = play(make_engine(qwen2, rows=64))
    assert replies(repeated) == replies(all_tasks)

    # One task of the three on an engine with one row: batches and caches are different.
    one_task = play(make_engine(qwen2, rows=1), tasks=TASKS[1:2])
    same_in_all = {name: all_tasks[name] for name in one_task}
    assert len(one_task) == 2
    assert replies(one_task) == replies(same_in_all)
    # float32 sums are in another order
    assert logprobs(one_task) == pytest.approx(logprobs(same_in_all), abs=1e-4)

    other_step = play(make_engine(qwen2, rows=64), step=STEP + 1)
    assert not set(map(str, replies(other_step).values())) & set(
        map(str, replies(all_tasks).values())
    )


def test_late_requests_leave_no_row_of_the_engine_occupied(qwen2):
    engine = make_engine(qwen2, rows=4)
    late = play(engine, deadlines=Deadlines(batch_s=0.002))
    assert Status.ABORTED in {trajectory.status for trajectory in late.values()}
    assert not engine.core.has_work
    assert not engine.open_requests()

    in_time = play(engine, tasks=TASKS[:1])
    assert {trajectory.status for trajectory in in_time.values()} == {Status.COMPLETED}


def test_a_turn_records_the_version_that_sampled_each_token(qwen2):
    engine = make_engine(qwen2, rows=4)

    async def run():
        collection = asyncio.create_task(
            collect(
                TASKS[:1],
                make_team_on(engine),
                Adder,
                two_turns,
                group_size=1,
                seed=SEED,
                step=STEP,
            )
        )
        while engine.core.stats.decode_tokens < 3:
            await asyncio.sleep(0)
        weights = Qwen2ForCausalLM.from_pretrained(qwen2).state_dict()
        await engine.load_weights(weights.items(), 7)
        return await collection

    [group] = asyncio.run(run())
    first, second = group.trajectories[0].turns
    assert first.versions == (
        VersionSpan(version=0, start=0, end=3),
        VersionSpan(version=7, start=3, end=len(first.completion_ids)),
    )
    assert (first.policy_version, first.oldest_version) == (7, 0)
    assert (second.policy_version, second.oldest_version) == (7, 7)
