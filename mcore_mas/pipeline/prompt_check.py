"""Check of the prompts of a run's first tasks against the length that its engines allow.

`prompt_problems` plays the tasks with the run's orchestra, environment, tools and chat templates, as a
training does. Only the replies are not sampled: they are empty, so the prompts are about the shortest
that the team can have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from mcore_mas.config.run import RunConfig, for_policy
from mcore_mas.runtime.players import make_players
from rollout.base.errors import PromptTooLong
from rollout.config.agents import build_team
from rollout.config.environment import build_env
from rollout.engines import ChatState, PolicyReply
from rollout.records.trajectory import Completion, Message, Sampling, Task, VersionSpan
from rollout.teams.episode import Episode
from rollout.teams.team import Team

_CHECKED_TASKS = 2
_SECONDS_PER_TASK = 10.0  # an environment may be slow
_MAX_TURNS = 50  # of a task


def prompt_problems(config: RunConfig, tasks: Sequence[Task]) -> Iterator[str]:
    """Yield a problem if an agent's prompt of one of the first tasks leaves no room for its reply.

    Teams that would start programs of the user are not played. Other errors than long prompts are not
    reported, because an empty reply may have caused them.

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
    for task in tasks[:_CHECKED_TASKS]:
        overlong = asyncio.run(_play(config, team, task))
        if overlong is not None:
            yield (
                f"task '{task.id}': {overlong} beside the reply; raise engine.max_length "
                f"({lengths}), or shorten the prompts"
            )
            return


async def _play(config: RunConfig, team: Team, task: Task) -> PromptTooLong | None:
    """Play a task; return the error of the first prompt that is too long, if there is one."""
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
    return episode.failure if isinstance(episode.failure, PromptTooLong) else None


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
