"""Mixture of agents: proposers answer side by side, an aggregator makes one answer of theirs."""

from __future__ import annotations

import asyncio

from rollout.base.options import Names
from rollout.base.tags import after_thought
from rollout.orchestras.answers import AnswerEnv, boxed, grade, parse_boxed
from rollout.records.trajectory import Task
from rollout.teams.team import AgentReply, TeamSession, register_agent

register_agent(
    "proposer",
    system="You are a careful problem solver.",
    user="{problem}\n\nReason step by step, and put your final answer within \\boxed{{}}.",
)(parse_boxed)

register_agent(
    "aggregator",
    system="You make one good solution of several.",
    user="""# Problem
{problem}

# Proposed solutions
{proposals}

# Your role
The proposals were written independently of each other, and any of them may be wrong, also the most common one. Compare
them, settle where they differ, and write one solution that is right. Reason step by step, and put the final answer
within \\boxed{{}}.""",
)(parse_boxed)


async def mixture(
    task: Task,
    team: TeamSession,
    env: AnswerEnv,
    *,
    proposers: Names = ("proposer_1", "proposer_2", "proposer_3"),
) -> None:
    """Ask all `proposers` side by side, then the agent `aggregator`, whose answer is final.

    Templates may use the slots `problem`, the aggregator's also `proposals`: all proposals without their thoughts, in
    the order in which the proposers are named. A malformed proposal is handed on as it was said; a malformed last reply
    leaves the team without an answer. Local score of a turn, as in MARTI: the reward that its answer would have alone.

    Raises:
        EnvError: the environment cannot grade single answers.
    """
    problem = env.reset(task)

    async def propose(name: str) -> AgentReply:
        reply = await team.act(name, problem=problem)
        await grade(team, env, reply)
        return reply

    replies = await asyncio.gather(*map(propose, proposers))
    texts = (after_thought(reply.text) for reply in replies)
    proposals = "\n\n".join(f"[Solution {number}]\n{text}" for number, text in enumerate(texts, start=1))
    final = await team.act("aggregator", problem=problem, proposals=proposals)
    await grade(team, env, final)
    await env.step(boxed(final.value))
