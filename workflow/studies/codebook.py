"""Two small teams in which the scale of an advantage decides what is learnt: tasks, environments and orchestras.

A task names two codes and a distractor, as in "17 30 4". Each agent must say one letter for one of the two codes,
from a code book that is fixed and unknown to it: 24 codes, 8 letters, so a guess is right one time in 8. A letter
depends on one code alone, so an agent's share of right letters on held-out tasks is its own skill, whoever speaks
before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random

from pydantic import PositiveInt

from rollout.base.section import Share
from rollout.environments.protocol import Step
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Demonstration, Message, Task
from rollout.tasks import Generator
from rollout.tasks.splits import split_of
from rollout.teams.roles import Role, register_agent
from rollout.teams.team import TeamSession

LETTERS = "abcdefgh"
CODES = range(10, 34)
_BOOKS = {
    agent: {code: Random(derive_seed("code book", agent, code)).choice(LETTERS) for code in CODES}
    for agent in ("solver", "rescuer", "spender")
}
_PLACE = {
    "solver": 0,
    "rescuer": 1,
    "spender": 1,
}  # which of the task's numbers an agent's letter depends on


def letter(prompt: str, agent: str) -> str:
    """The right letter of an agent in a task."""
    return _BOOKS[agent][int(prompt.split()[_PLACE[agent]])]


def tasks(seed: int, sizes: Mapping[str, int]) -> list[Task]:
    """`sizes[split]` different tasks of each split; a task is in one split whatever the seed."""
    prompts = [f"{a} {b} {noise}" for a in CODES for b in CODES for noise in range(10)]
    Random(derive_seed(seed, "code book tasks")).shuffle(prompts)
    drawn = []
    for split, size in sizes.items():
        own = [prompt for prompt in prompts if split_of(prompt) == split]
        if size > len(own):
            raise ValueError(
                f"code book: {size} {split} tasks asked for and there are {len(own)}; lower data.{split}"
            )
        drawn += [
            Task(
                id=text,
                prompt=text,
                answers=("",),
                env="codebook:guess",
                source="codes",
                split=split,
            )
            for text in own[:size]
        ]
    return drawn


def demonstrations(
    seed: int, n: int, *, roles: Mapping[str, Role], slips: Mapping[str, Share]
) -> Iterator[Demonstration]:
    """`n` letters, each right but for its agent's share of `slips`, which are drawn from all letters."""
    random = Random(derive_seed(seed, "code book demonstrations"))
    agents = sorted(roles)
    while n:
        prompt = f"{random.choice(CODES)} {random.choice(CODES)} {random.randrange(10)}"
        if split_of(prompt) != "train":
            continue
        n -= 1
        agent = random.choice(agents)
        said = random.choice(LETTERS) if random.random() < slips[agent] else letter(prompt, agent)
        messages = roles[agent].messages(problem=prompt)
        yield Demonstration(
            agent=agent, messages=(*messages, Message(role="assistant", content=said))
        )


GENERATOR = Generator(tasks=tasks, demonstrations=demonstrations)


def parse_letter(text: str) -> str | None:
    """The letter, None for anything else."""
    return text if text in LETTERS and len(text) == 1 else None


for _agent in _BOOKS:
    register_agent(f"code_{_agent}", system="", user=f"{_agent} {{problem}}")(parse_letter)


class Guess:
    """One task; `step` takes "agent letter", and tells whether it is right."""

    _prompt = ""

    def reset(self, task: Task) -> str:
        self._prompt = task.prompt
        return task.prompt

    async def step(self, action: str) -> Step:
        agent, _, said = action.partition(" ")
        right = float(said == letter(self._prompt, agent))
        return Step(
            reward=right if agent != "spender" else 0.0, done=bool(right), metrics={"right": right}
        )


def guess(task: Task) -> Guess:
    """The environment of a task."""
    return Guess()


async def rescue(task: Task, team: TeamSession, env: Guess, *, calls: PositiveInt = 4) -> None:
    """The solver says a letter; only where it is wrong the rescuer is called, up to `calls` times. One shared outcome.

    The rescuer acts in few trajectories, and in those that go wrong: its mean reward is far below the team's.
    """
    problem = env.reset(task)
    reply = await team.act("solver", problem=problem)
    found = await env.step(f"solver {reply.value}")
    for _ in range(calls):
        if found.done:
            return
        reply = await team.act("rescuer", problem=problem)
        found = await env.step(f"rescuer {reply.value}")


async def scale(task: Task, team: TeamSession, env: Guess, *, cost: float = 50.0) -> None:
    """The solver earns 1 for a right letter; the spender loses up to `cost` for a wrong one. Local rewards.

    Two agents in one trajectory, with rewards of scales that differ by `cost`.
    """
    problem = env.reset(task)
    for agent in ("solver", "spender"):
        reply = await team.act(agent, problem=problem)
        right = (await env.step(f"{agent} {reply.value}")).metrics["right"]
        spent = -cost * (1 - right) * Random(team.seed("cost")).random()
        team.score(reply.turn, local=right if agent == "solver" else spent)
