"""Agents side by side: MARTI's debate and mixture of agents, Stronger-MAS's math team and its ensemble with a judge.

Replies are read without their thoughts, malformed ones as they were said; a malformed last one leaves the team without
an answer. The local score of a turn is the reward that its answer would have alone, 1 or 0; of a tool user's, whose
answer is the last line that its program printed, -1 when the program failed or there is none.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, NonNegativeInt, PositiveInt, ValidationInfo

from rollout.base.section import Names
from rollout.environments.protocol import PlayedEnv, after_thought
from rollout.orchestras.replies import boxed, calculated, graded, numbered, vote
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Task
from rollout.teams.roles import AgentReply
from rollout.teams.team import TeamSession


async def debate(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    debaters: Names = ("debater_1", "debater_2", "debater_3"),
    rounds: PositiveInt = 2,
    max_others: NonNegativeInt = 5,
    contain_self: bool = True,
) -> None:
    """Let all `debaters` answer side by side, `rounds` times; the answer given most often in the last round is final.

    Templates may use the slots `problem` and `others`: replies of the round before, shuffled by a hash of task, round
    and agent; "" in the first round. Of equally frequent answers the one whose debater is named first is final. A
    malformed reply does not vote; when nobody votes the team has no answer.

    Args:
        debaters: agents that debate.
        rounds: rounds of answers.
        max_others: other agents' replies that each agent reads, at most.
        contain_self: each agent also reads its own last reply.
    """
    problem = env.reset(task)
    said: dict[str, str] = {}
    replies: list[AgentReply] = []
    for number in range(rounds):
        heard = [
            _others(said, name, (task.id, number), max_others, contain_self) for name in debaters
        ]
        asked = (
            graded(team, env, name, problem=problem, others=others)
            for name, others in zip(debaters, heard, strict=True)
        )
        replies = await asyncio.gather(*asked)
        said = {
            name: after_thought(reply.text) for name, reply in zip(debaters, replies, strict=True)
        }
    await env.step(boxed(await vote(env, [reply.value for reply in replies])))


def _others(
    said: Mapping[str, str], listener: str, place: tuple[str, int], most: int, contain_self: bool
) -> str:
    """What `listener` reads of what was `said`."""

    def shuffled(names: Sequence[str]) -> list[str]:
        return sorted(names, key=lambda name: derive_seed("debate", *place, listener, name))

    chosen = shuffled([name for name in said if name != listener])[:most]
    own = [listener] if contain_self and listener in said else []
    names = shuffled([*chosen, *own])
    return numbered(said[name] for name in names)


async def mixture(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    proposers: Names = ("proposer_1", "proposer_2", "proposer_3"),
) -> None:
    """Ask all `proposers` side by side, then the agent `aggregator`, whose answer is final.

    Templates may use the slots `problem`, the aggregator's also `proposals`, in the order in which the proposers are
    named.

    Args:
        proposers: agents that propose.
    """
    problem = env.reset(task)
    replies = await asyncio.gather(
        *(graded(team, env, name, problem=problem) for name in proposers)
    )
    proposals = numbered(after_thought(reply.text) for reply in replies)
    final = await graded(team, env, "aggregator", problem=problem, proposals=proposals)
    await env.step(boxed(final.value))


async def reason_tool(
    task: Task, team: TeamSession, env: PlayedEnv, *, max_turns: PositiveInt = 4
) -> None:
    """Ask `tool_user` and `reasoner` side by side until their answers are equal or `max_turns` are spent.

    The reasoner's last answer is final. Templates may use the slots `problem` and `history`, all turns before: what
    the reasoner said, the tool user's program and what came of it. A malformed reply agrees with nothing.

    Args:
        max_turns: turns of the team, at most.
    """
    problem = env.reset(task)
    history = ""
    for _ in range(max_turns):
        slots = {"problem": problem, "history": history}
        (computed, shown), reasoned = await asyncio.gather(
            calculated(team, env, **slots), graded(team, env, "reasoner", **slots)
        )
        if computed and reasoned.value and await env.same(computed, reasoned.value):
            break
        history += f"[The program and what it printed]\n{shown}\n\n[The reasoner]\n{after_thought(reasoned.text)}\n\n"
    await env.step(boxed(reasoned.value))


def _somebody(tool_users: int, info: ValidationInfo) -> int:
    if not tool_users and not info.data.get("reasoners"):
        raise ValueError("expected at least 1 without reasoners")
    return tool_users


async def ensemble_judge(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    reasoners: NonNegativeInt = 2,
    tool_users: Annotated[NonNegativeInt, AfterValidator(_somebody)] = 1,
) -> None:
    """Ask `reasoner` and `tool_user` so many times side by side, then `judge`, whose answer is final.

    Templates may use the slots `problem` and `history`, which is always "" (the roles are those of `reason_tool`), the
    judge's `problem` and `candidates`: what the reasoners said, then the tool users' programs with what came of them.

    Args:
        reasoners: replies of the agent `reasoner`.
        tool_users: replies of the agent `tool_user`.
    """
    problem = env.reset(task)
    slots = {"problem": problem, "history": ""}

    async def reason() -> str:
        return after_thought((await graded(team, env, "reasoner", **slots)).text)

    async def calculate() -> str:
        return (await calculated(team, env, **slots))[1]

    asked = [reason() for _ in range(reasoners)] + [calculate() for _ in range(tool_users)]
    candidates = numbered(await asyncio.gather(*asked))
    verdict = await graded(team, env, "judge", problem=problem, candidates=candidates)
    await env.step(boxed(verdict.value))
