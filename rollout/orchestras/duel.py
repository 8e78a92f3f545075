"""Duel: two agents play a zero-sum game against each other."""

from rollout.environments.protocol import PlayedEnv
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession


async def duel(task: Task, team: TeamSession, env: PlayedEnv) -> None:
    """Let the agents `first` and `second` play one game, until the environment ends it.

    The environment names the agent whose turn it is and is stepped with the parsed reply, or with
    "" if the reply is malformed. Templates may use the slots `problem` (the rules) and `state` (what
    the agent has seen).

    The score `local` of every turn is the number of points that its agent has won in the game: the
    outcome for `first`, and the negative outcome for `second`.
    """
    problem = env.reset(task)
    turns: list[tuple[int, str]] = []
    while True:
        decision = await env.decision()
        reply = await team.act(decision.player, problem=problem, state=decision.observation)
        turns.append((reply.turn, decision.player))
        step = await env.step(reply.value or "")
        if step.done:
            break
    for turn, player in turns:
        team.score(turn, local=step.reward if player == "first" else -step.reward)
