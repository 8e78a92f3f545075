"""Orchestras that ask several agents at the same time.

`debate` and `mixture` are MARTI's, `reason_tool` and `ensemble_judge` Stronger-MAS's. Agents see
the others' replies, including malformed ones, without the thoughts, and a malformed last reply
leaves the team without an answer.

The local score of a turn is the reward that its answer alone would have. A tool user's turn has the
local score -1 if there is no program or it failed.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, NonNegativeInt, PositiveInt, ValidationInfo

from rollout.base.section import Names
from rollout.environments.protocol import PlayedEnv, after_thought
from rollout.orchestras.answers import ask_for_answer, ask_tool_user, boxed, numbered, vote
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
    """Ask all `debaters` at once, in several rounds; the majority of the last round decides.

    Templates may use the slots `problem` and `others`, replies of the round before, at first "".
    The order of these replies is random, and the same whenever the task is played again.

    A malformed reply does not vote, and a team without votes has no answer. If several answers are
    equally frequent, that of the debater who is named first is final.

    Args:
        debaters: agents that debate.
        rounds: number of rounds, in each of which every debater answers.
        max_others: maximum number of replies of other debaters that a debater reads.
        contain_self: if true, a debater also reads its own reply of the round before.
    """
    problem = env.reset(task)
    replies: dict[str, AgentReply] = {}  # of the latest round, by debater
    for round_number in range(rounds):
        previous_texts = {name: after_thought(reply.text) for name, reply in replies.items()}
        calls = []
        for name in debaters:
            texts = _texts_for_debater(
                name,
                previous_texts,
                seed_path=(task.id, round_number),
                max_others=max_others,
                contain_self=contain_self,
            )
            calls.append(ask_for_answer(team, env, name, problem=problem, others=numbered(texts)))
        replies = dict(zip(debaters, await asyncio.gather(*calls), strict=True))

    answers = [reply.value for reply in replies.values()]
    await env.step(boxed(await vote(env, answers)))


def _texts_for_debater(
    debater: str,
    previous_texts: Mapping[str, str],
    *,
    seed_path: tuple[str, int],
    max_others: int,
    contain_self: bool,
) -> list[str]:
    """Return the texts that a debater reads, in a random order.

    Args:
        debater: name of the debater.
        previous_texts: text of every debater in the round before, by name.
        seed_path: task id and round number, which decide the order together with the names.
        max_others: maximum number of texts of other debaters.
        contain_self: if true, the debater's own text is among them.
    """

    def shuffled(names: Sequence[str]) -> list[str]:
        return sorted(names, key=lambda name: derive_seed("debate", *seed_path, debater, name))

    names = shuffled([name for name in previous_texts if name != debater])[:max_others]
    if contain_self and debater in previous_texts:
        names = shuffled([*names, debater])
    return [previous_texts[name] for name in names]


async def mixture(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    proposers: Names = ("proposer_1", "proposer_2", "proposer_3"),
) -> None:
    """Ask all `proposers` at the same time, then `aggregator`, whose answer is final.

    Templates may use the slot `problem`; that of the aggregator also `proposals`, the proposers'
    replies in the order of `proposers`.

    Args:
        proposers: agents that propose a solution.
    """
    problem = env.reset(task)
    calls = [ask_for_answer(team, env, name, problem=problem) for name in proposers]
    replies = await asyncio.gather(*calls)
    proposals = numbered(after_thought(reply.text) for reply in replies)
    final = await ask_for_answer(team, env, "aggregator", problem=problem, proposals=proposals)
    await env.step(boxed(final.value))


async def reason_tool(
    task: Task, team: TeamSession, env: PlayedEnv, *, max_turns: PositiveInt = 4
) -> None:
    """Ask `tool_user` and `reasoner` at once until they agree; the reasoner's answer is final.

    Templates may use the slots `problem` and `history`: for each earlier round, the tool user's
    program with its output, and the reasoner's reply. A malformed reply agrees with no answer.

    Args:
        max_turns: maximum number of rounds; in each, both agents are asked once.
    """
    problem = env.reset(task)
    history = ""
    for _ in range(max_turns):
        slots = {"problem": problem, "history": history}
        calculation, reasoning = await asyncio.gather(
            ask_tool_user(team, env, **slots), ask_for_answer(team, env, "reasoner", **slots)
        )
        computed = calculation.answer
        if computed and reasoning.value and await env.same(computed, reasoning.value):
            break
        history += f"[The program and what it printed]\n{calculation.transcript}\n\n"
        history += f"[The reasoner]\n{after_thought(reasoning.text)}\n\n"
    await env.step(boxed(reasoning.value))


def _check_not_without_agents(tool_users: int, info: ValidationInfo) -> int:
    """Validate `tool_users`, which may be 0 only if there are `reasoners`."""
    if not tool_users and not info.data.get("reasoners"):
        raise ValueError("expected at least 1 because reasoners is 0")
    return tool_users


async def ensemble_judge(
    task: Task,
    team: TeamSession,
    env: PlayedEnv,
    *,
    reasoners: NonNegativeInt = 2,
    tool_users: Annotated[NonNegativeInt, AfterValidator(_check_not_without_agents)] = 1,
) -> None:
    """Ask `reasoner` and `tool_user` several times at once, then `judge`, whose answer is final.

    Templates of reasoner and tool user may use the slots `problem` and `history`; `history` is
    always "", and exists because their roles are those of `reason_tool`. The judge's template may
    use `problem` and `candidates`: the reasoners' replies, then the tool users' programs with their
    output.

    Args:
        reasoners: replies of the agent `reasoner`.
        tool_users: replies of the agent `tool_user`; at least 1 if `reasoners` is 0.
    """
    problem = env.reset(task)
    slots = {"problem": problem, "history": ""}

    async def reason() -> str:
        reply = await ask_for_answer(team, env, "reasoner", **slots)
        return after_thought(reply.text)

    async def calculate() -> str:
        calculation = await ask_tool_user(team, env, **slots)
        return calculation.transcript

    calls = [reason() for _ in range(reasoners)]
    calls += [calculate() for _ in range(tool_users)]
    candidates = numbered(await asyncio.gather(*calls))
    verdict = await ask_for_answer(team, env, "judge", problem=problem, candidates=candidates)
    await env.step(boxed(verdict.value))
