"""Check of a run's first tasks: the prompts fit into the engines, and the user's reward can be called.

`prompt_problems` plays the tasks with the run's orchestra, environment, tools and chat templates, as a
training does. Only the replies are not sampled: they are empty, so the prompts are about the shortest
that the team can have.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import for_policy
from mcore_mas.runtime.players import make_players
from rollout.base.error_location import describe_with_location
from rollout.base.errors import PromptTooLong
from rollout.config.agents import build_team
from rollout.config.environment import build_env
from rollout.config.reward import build_allocator
from rollout.engines import ChatState, PolicyReply
from rollout.records.trajectory import (
    Completion,
    Group,
    Message,
    Sampling,
    Task,
    Trajectory,
    VersionSpan,
)
from rollout.teams.episode import Episode
from rollout.teams.team import Team

_CHECKED_TASKS = 2
_SECONDS_PER_TASK = 10.0  # an environment may be slow
_MAX_TURNS = 50  # of a task
# Allocator of the Python API for rewards that are functions of one trajectory.
_BY_TRAJECTORY = "mcore_mas.api.rewards:by_trajectory"
_REWARD_S = 10.0  # a reward may be slow; it is not waited for any longer


def prompt_problems(config: RunConfig, tasks: Sequence[Task]) -> Iterator[str]:
    """Yield a problem if an agent's prompt leaves no room for its reply, or if the user's reward fails.

    Teams that would start programs of the user are not played. Other errors of a play are not
    reported, because an empty reply may have caused them. The reward is called for the first task that
    is played to its end.

    Args:
        config: the run's config; the models of its local policies must exist.
        tasks: training tasks.

    Raises:
        ModelError: a tokenizer or a chat template cannot be loaded.
    """
    if config.orchestra.name == "program" or config.env.name == "mcp":
        return
    players = make_players(config, dict.fromkeys(config.models, _SilentEngine()))
    remotes = dict.fromkeys(config.remotes, _SilentPolicy())
    team = replace(build_team(config.agents, {**players, **remotes}), max_turns=_MAX_TURNS)

    max_lengths = {for_policy(config, policy).engine.max_length for policy in config.models}
    lengths = ", ".join(map(str, sorted(max_lengths)))
    reward_is_unchecked = ":" in config.reward.name  # only a reward of the user is called
    for task in tasks[:_CHECKED_TASKS]:
        episode = asyncio.run(_play(config, team, task))
        if isinstance(episode.failure, PromptTooLong):
            yield (
                f"task '{task.id}': {episode.failure} beside the reply; raise engine.max_length "
                f"({lengths}), or shorten the prompts"
            )
            return
        if reward_is_unchecked and not episode.error and episode.outcome is not None:
            reward_is_unchecked = False
            problem = _reward_problem(config, _group_of(config, task, episode))
            if problem:
                yield problem
                return


def _group_of(config: RunConfig, task: Task, episode: Episode) -> Group:
    """Return the group that the reward is called with: one trajectory, or as many as it compares."""
    is_by_trajectory = config.reward.name == _BY_TRAJECTORY
    count = 1 if is_by_trajectory else config.trainer.group_size
    trajectories = []
    for sample in range(count):
        trajectory = Trajectory(
            id=f"check/{task.id}/{sample}",
            task_id=task.id,
            source=task.source,
            sample=sample,
            step=0,
            turns=episode.turns,
            tools=tuple(episode.tools),
            outcome=episode.outcome,
            answer=episode.answer,
            leaf=episode.leaf,
            metrics=episode.metrics,
        )
        trajectories.append(trajectory)
    return Group(task=task, trajectories=tuple(trajectories))


def _reward_problem(config: RunConfig, group: Group) -> str:
    """Call the reward in a thread; describe the error that it raises, "" if there is none in time."""
    problems: list[str] = []

    def call() -> None:
        try:
            build_allocator(config.reward, config.agents)(group)
        except (Exception, SystemExit) as error:
            problems.append(
                f"reward '{config.reward.name}', called with an empty reply to task '{group.task.id}': "
                f"{describe_with_location(error)}"
            )

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(_REWARD_S)
    return problems[0] if problems else ""


async def _play(config: RunConfig, team: Team, task: Task) -> Episode:
    """Play a task with empty replies."""
    # An environment needs its retriever or sandbox for a step, and not for the first prompts.
    make_env = build_env(config.env, **dict.fromkeys(config.env.needs))
    episode = Episode(
        task,
        team.session("check", task.id),
        make_env,
        config.orchestra.call,
        name=config.env.name,
    )
    with suppress(TimeoutError):
        async with asyncio.timeout(_SECONDS_PER_TASK):
            await episode.play()
    return episode


class _SilentEngine:
    """Engine that ends every reply at once."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return Completion(
            token_ids=sampling.stop[:1],
            logprobs=(0.0,),
            finish_reason="stop",
            versions=(VersionSpan(version=0, start=0, end=1),),
        )


class _SilentPolicy:
    """Stand-in for a remote policy, whose tokens are not known here."""

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        completion = Completion(
            token_ids=(),
            logprobs=(),
            finish_reason="stop",
            versions=(VersionSpan(version=0, start=0, end=0),),
        )
        return PolicyReply(text="", prompt_ids=(), completion=completion, trainable=False)
