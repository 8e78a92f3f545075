"""MARTI's debate: agents answer side by side, read each other's answers and answer again; the majority decides."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from pydantic import NonNegativeInt, PositiveInt

from rollout.base.options import Names
from rollout.base.seeds import derive_seed
from rollout.base.tags import after_thought
from rollout.orchestras.answers import AnswerEnv, boxed, grade, parse_boxed, vote
from rollout.records.trajectory import Task
from rollout.teams.team import AgentReply, TeamSession, register_agent

register_agent(
    "debater",
    system="You take part in a debate about the right answer to a problem.",
    user="""# Problem
{problem}

# Solutions of the round before
{others}

# Your role
Where solutions are given above, find out which of their steps hold and which do not; agree with nobody out of
politeness. Then solve the problem step by step, and put your final answer within \\boxed{{}}.""",
)(parse_boxed)


async def debate(
    task: Task,
    team: TeamSession,
    env: AnswerEnv,
    *,
    debaters: Names = ("debater_1", "debater_2", "debater_3"),
    rounds: PositiveInt = 2,
    max_others: NonNegativeInt = 5,
    contain_self: bool = True,
) -> None:
    """Let all `debaters` answer side by side, `rounds` times; the answer given most often in the last round is final.

    Templates may use the slots `problem` and `others`: the replies of the round before without their thoughts, at most
    `max_others` of the others' and, with `contain_self`, the agent's own, shuffled by a hash of task, round and agent;
    "" in the first round. Of equally frequent answers the one whose debater is named first is final. A malformed reply
    is still read by the others but does not vote; when nobody votes the team has no answer. Local score of a turn, as
    in MARTI: the reward that its answer would have alone.

    Raises:
        EnvError: the environment cannot grade or compare single answers.
    """
    problem = env.reset(task)

    async def speak(name: str, others: str) -> AgentReply:
        reply = await team.act(name, problem=problem, others=others)
        await grade(team, env, reply)
        return reply

    said: dict[str, str] = {}
    replies: list[AgentReply] = []
    for number in range(rounds):
        heard = [_others(said, name, (task.id, number), max_others, contain_self) for name in debaters]
        replies = await asyncio.gather(*map(speak, debaters, heard))
        said = {name: after_thought(reply.text) for name, reply in zip(debaters, replies, strict=True)}
    await env.step(boxed(await vote(env, [reply.value for reply in replies])))


def _others(said: Mapping[str, str], listener: str, place: tuple[str, int], most: int, contain_self: bool) -> str:
    """What `listener` reads of what was `said`."""

    def shuffled(names: Sequence[str]) -> list[str]:
        return sorted(names, key=lambda name: derive_seed("debate", *place, listener, name))

    chosen = shuffled([name for name in said if name != listener])[:most]
    own = [listener] if contain_self and listener in said else []
    names = shuffled([*chosen, *own])
    return "\n\n".join(f"[Solution {number}]\n{said[name]}" for number, name in enumerate(names, start=1))
