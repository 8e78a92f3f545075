"""Environment protocol: `reset` and `step`, optional abilities, and tags in the text that agents are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollout.records.trajectory import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call that a step made."""

    tool: str
    query: str
    result: str
    failed: bool = False  # through the agent's own fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an environment answers to an action."""

    observation: str = ""
    reward: float = 0.0  # summed over the steps, this is the trajectory's outcome
    done: bool = False
    answer: str | None = (
        None  # the team's answer so far, equal ones written equally; "": none yet, None: not reported
    )
    tools: tuple[ToolCall, ...] = ()
    passages: tuple[
        str, ...
    ] = ()  # what a search found, best first, each as the observation shows it
    metrics: dict[str, float] = field(
        default_factory=dict
    )  # `solved`, where there is one, is what evaluation counts


class AgentMistake(ValueError):
    """What an agent wrote cannot be used: says why, in words for the agent, and nothing that it must not know."""


class Env(Protocol):
    """One task's world, used by one trajectory; any of its methods may raise what `step` raises."""

    def reset(self, task: Task) -> str:
        """Start `task`; returns the problem as the agents see it."""

    async def step(self, action: str) -> Step:
        """Apply an agent's text.

        Raises:
            EnvError: a tool failed for good; `Undecided` when it is not known what the text is worth.
        """


class Living(Protocol):
    """What an environment has besides that holds something of the machine: a process, a session, a connection."""

    async def open(self, task: Task) -> None:
        """Take hold of it, before `reset`. A parameter `calls` gets the trajectory's `CallRecord`."""

    async def close(self) -> None:
        """Let go of it, however the trajectory ended; also when `open` failed or was never called."""


Case = tuple[
    str, str
]  # what a program is given, and what it should answer, as an agent writes them


class PlayedEnv(Env, Protocol):
    """An environment as orchestras have it, in an episode, with what one may do besides, without a step.

    Where it lacks an ability, that raises EnvError. It previews where it has no side effects, says whether answers are
    the `same` where equal ones need not look alike, keeps `files` that agents leave for each other, and `check`s
    programs with tests that agents write.
    """

    async def preview(self, action: str) -> Step:
        """What `step` would answer, with the world left as it is."""

    async def same(self, answer: str, other: str) -> bool:
        """Whether two answers are known to be equal."""

    async def run(self, program: str) -> ToolCall:
        """Run an agent's Python program; the result is what it printed, and what went wrong if it failed."""

    async def files(self) -> Mapping[str, int]:
        """Size in bytes of every file, by path."""

    async def forget(self) -> None:
        """End the process that programs share: its variables are gone, the files stay."""

    async def check(self, program: str, cases: Sequence[Case]) -> Step:
        """Run an agent's program on an agent's tests.

        Returns:
            What went wrong as observation, the run as tool call, and the metric `check_rate`: the share of tests that
            pass, 0 without any.
        """

    async def agreement(self, cases: Sequence[Case]) -> float | None:
        """The share of an agent's tests that the task's own solution passes, 0 without any; None when it has none."""


def last_tag(text: str, name: str) -> str | None:
    """The stripped content of the last complete `<name>…</name>` in `text`; None when there is none.

    The innermost opening tag counts, so an earlier tag that was never closed is skipped.
    """
    opening, closing = f"<{name}>", f"</{name}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end].strip() if start >= 0 else None


def after_thought(text: str) -> str:
    """What was said after any thought, stripped."""
    return text.rpartition("</think>")[2].strip()
