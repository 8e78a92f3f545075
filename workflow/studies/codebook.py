"""Two small teams whose learning depends on the scale of the advantages.

The module defines their tasks and demonstrations (`GENERATOR`), their environment (`guess`) and
their orchestras (`rescue`, `scale`).

A task names two codes and a distractor, for example "17 30 4". Each agent answers one of the codes
with a letter. For each agent a fixed code book gives the right letter of each code; no agent sees a
code book. There are 24 codes and 8 letters, so a guess is right in 1 of 8 cases. The right letter depends
on one code only, so an agent's share of right letters on held-out tasks measures its skill
independently of the other agent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random

from pydantic import PositiveInt

from rollout.base.section import Share
from rollout.environments.protocol import Step
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Demonstration, Message, Task
from rollout.tasks.generators import Generator
from rollout.tasks.splits import split_of
from rollout.teams.roles import Role, register_agent
from rollout.teams.team import TeamSession

LETTERS = "abcdefgh"
CODES = range(10, 34)

# Position in the task of the code that each agent answers.
_POSITIONS = {"solver": 0, "rescuer": 1, "spender": 1}


def _code_book(agent: str) -> dict[int, str]:
    return {code: Random(derive_seed("code book", agent, code)).choice(LETTERS) for code in CODES}


_CODE_BOOKS = {agent: _code_book(agent) for agent in _POSITIONS}


def letter(prompt: str, agent: str) -> str:
    """Return the right letter of an agent in a task."""
    code = int(prompt.split()[_POSITIONS[agent]])
    return _CODE_BOOKS[agent][code]


def tasks(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """Return the tasks of each split.

    All tasks differ. The split of a task does not depend on the seed.

    Args:
        seed: seed of the order in which tasks are drawn.
        sizes: number of tasks by split.

    Raises:
        ValueError: a split has fewer tasks.
    """
    prompts = [f"{a} {b} {noise}" for a in CODES for b in CODES for noise in range(10)]
    Random(derive_seed(seed, "code book tasks")).shuffle(prompts)

    drawn: list[Task] = []
    for split, size in sizes.items():
        candidates = [prompt for prompt in prompts if split_of(prompt) == split]
        if size > len(candidates):
            raise ValueError(
                f"code book: data.{split} is {size}, but there are {len(candidates)} tasks of "
                "this split; lower it"
            )
        drawn += [
            Task(
                id=prompt,
                prompt=prompt,
                answers=("",),  # not used: `Guess` looks the right letters up
                env="codebook:guess",
                source="codes",
                split=split,
            )
            for prompt in candidates[:size]
        ]
    return drawn


def demonstrations(
    seed: int, n: int, *, roles: Mapping[str, Role], slips: Mapping[str, Share]
) -> Iterator[Demonstration]:
    """Yield `n` demonstrations of one letter each, by random agents on training tasks.

    Args:
        seed: seed of tasks, agents and slips.
        n: number of demonstrations.
        roles: role by agent.
        slips: share of an agent's demonstrations whose letter is random instead of right.
    """
    random = Random(derive_seed(seed, "code book demonstrations"))
    agents = sorted(roles)
    while n:
        prompt = f"{random.choice(CODES)} {random.choice(CODES)} {random.randrange(10)}"
        if split_of(prompt) != "train":
            continue
        n -= 1

        agent = random.choice(agents)
        slipped = random.random() < slips[agent]
        reply = random.choice(LETTERS) if slipped else letter(prompt, agent)
        messages = roles[agent].messages(problem=prompt)
        yield Demonstration(
            agent=agent, messages=(*messages, Message(role="assistant", content=reply))
        )


GENERATOR = Generator(tasks=tasks, demonstrations=demonstrations)


def parse_letter(text: str) -> str | None:
    """Return a reply that is exactly one of LETTERS, or None for any other reply."""
    return text if text in LETTERS and len(text) == 1 else None


for _agent in _POSITIONS:
    register_agent(f"code_{_agent}", system="", user=f"{_agent} {{problem}}")(parse_letter)


class Guess:
    """Environment of one task, in which an action names agent and letter, such as "solver c"."""

    _prompt = ""

    def reset(self, task: Task) -> str:
        self._prompt = task.prompt
        return task.prompt

    async def step(self, action: str) -> Step:
        """Return a step that is done if the letter is right.

        The spender's reward is 0, so that the outcome of `scale` depends on the solver alone. The
        spender learns from the local score that `scale` sets.
        """
        agent, _, guessed = action.partition(" ")
        right = float(guessed == letter(self._prompt, agent))
        return Step(
            reward=right if agent != "spender" else 0.0, done=bool(right), metrics={"right": right}
        )


def guess(task: Task) -> Guess:
    """Return the environment of a task."""
    return Guess()


async def rescue(task: Task, team: TeamSession, env: Guess, *, calls: PositiveInt = 4) -> None:
    """Play a team in which the rescuer acts only if the solver is wrong; all share one reward.

    The rescuer is called up to `calls` times until it is right. If the solver is mostly right from
    the start, the rescuer acts in few trajectories, all of which begin with a wrong letter. The
    mean reward of these is far below that of all trajectories.
    """
    problem = env.reset(task)
    reply = await team.act("solver", problem=problem)
    step = await env.step(f"solver {reply.value}")
    for _ in range(calls):
        if step.done:
            return
        reply = await team.act("rescuer", problem=problem)
        step = await env.step(f"rescuer {reply.value}")


async def scale(task: Task, team: TeamSession, env: Guess, *, cost: float = 50.0) -> None:
    """Play a team of two agents whose local scores differ in scale by the factor `cost`.

    The local score of the solver is 1 for a right letter, else 0. That of the spender is 0 for a right
    letter, else a random penalty of up to `cost`. Both agents always act.
    """
    problem = env.reset(task)
    for agent in ("solver", "spender"):
        reply = await team.act(agent, problem=problem)
        right = (await env.step(f"{agent} {reply.value}")).metrics["right"]
        loss = cost * (1 - right) * Random(team.seed("cost")).random()
        team.score(reply.turn, local=right if agent == "solver" else -loss)
