"""Team whose agents reply with numbers, and an environment that adds them up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.base.errors import EnvError
from rollout.engines import EngineClient
from rollout.environments.protocol import Step, ToolCall
from rollout.models.tool_calls import ToolFormat, ToolSchema
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Group, Message, Sampling, Task, Turn
from rollout.teams.collect import CollectOptions, Collector
from rollout.teams.roles import Agent, Role
from rollout.teams.team import Team
from tests.support.scripted_engine import ScriptedEngine

SEED = 7
STEP = 3
TASK = Task(id="t", prompt="say numbers", answers=("0",), env="adder", source="sums", split="train")
AGENTS = ("a", "b")


async def collect(
    tasks: Sequence[Task],
    team: Team,
    make_env: Any,
    orchestra: Any,
    *,
    group_size: int,
    seed: int,
    step: int,
    **options: Any,
) -> list[Group]:
    """Return the groups of trajectories of the tasks; `options` are fields of `CollectOptions`."""
    collector = Collector(
        team=team,
        make_env=make_env,
        orchestra=orchestra,
        seed=seed,
        step=step,
        options=CollectOptions(**options),
    )
    return await collector.collect(tasks, group_size)


class Bytes:
    """Renderer whose tokens are UTF-8 bytes; 0 ends a reply."""

    stop = (0,)
    tool_format: ToolFormat = "fenced"

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        return tuple("\n".join(message.raw or message.content for message in messages).encode())

    def extend(
        self, before: Turn, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        new_messages = messages[len(before.messages) + 1 :]  # after the reply of `before`
        return before.prompt_ids + before.completion_ids + self.render(new_messages)

    def next_prompt(
        self, before: Turn | None, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[tuple[int, ...], bool]:
        if before is None:
            return self.render(messages, tools), False
        return self.extend(before, messages, tools), False

    def decode_raw(self, token_ids: tuple[int, ...]) -> str:
        return self.decode(token_ids)

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return bytes(token for token in token_ids if token).decode()


class Adder:
    """Environment that pays the number in an action; `boom` raises EnvError, `look` calls a tool."""

    def __init__(self, task: Task) -> None:
        self.total = 0.0

    def reset(self, task: Task) -> str:
        return task.prompt

    async def step(self, action: str) -> Step:
        if action == "boom":
            raise EnvError("the adder broke")
        if action.startswith("look"):
            return Step(
                observation=f"{self.total:g}",
                tools=(ToolCall(tool="eye", query=action, result="seen"),),
            )
        self.total += float(action)
        return Step(
            observation=f"{self.total:g}", reward=float(action), metrics={"total": self.total}
        )


def number(text: str) -> str | None:
    """Return the text, or None if it is a word; the parser of the agents' roles."""
    return None if text.isalpha() else text


def make_team(engine: object) -> Team:
    """Return a team of agents `a` and `b` on one policy; their prompts have the slot `said`."""
    agents = {
        name: Agent(
            name=name,
            role=Role(name=name, system="", user="{said}", parse=number),
            policy="p",
            sampling=Sampling(max_tokens=99, temperature=0.7),
        )
        for name in AGENTS
    }
    return Team(agents, {"p": EngineClient(engine=engine, renderer=Bytes())})  # type: ignore[arg-type]


def seeded(
    replies: Mapping[tuple[str, int, str], str], *, task: str = TASK.id, sample: int = 0
) -> tuple[ScriptedEngine, Callable[[], list[tuple[str, int, str]]]]:
    """Return an engine that replies by (agent, turn, node), and a function that lists its calls.

    The engine identifies a call by its seed alone, so that a wrong or repeated seed gets a wrong
    reply.

    Args:
        replies: replies by (agent, turn, node); the node of first branches is "".
        task: task id.
        sample: number of the trajectory in its group.
    """
    calls_by_seed = {}
    for agent, turn, node in replies:
        keys = (agent, turn, node) if node else (agent, turn)
        seed = derive_seed(SEED, STEP, task, sample, *keys)
        calls_by_seed[seed] = (agent, turn, node)

    def reply(prompt: tuple[int, ...], call: int) -> tuple[int, ...]:
        seed = engine.calls[call][1].seed
        return (*replies[calls_by_seed[seed]].encode(), 0)

    def calls() -> list[tuple[str, int, str]]:
        return [calls_by_seed[sampling.seed] for _, sampling in engine.calls]

    engine = ScriptedEngine(reply)
    return engine, calls
