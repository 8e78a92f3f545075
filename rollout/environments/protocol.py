"""Environment protocol: `reset` and `step`, optional methods, and tags in the texts of agents.

`Env` has the methods that every environment needs. The optional methods are in `ResourceEnv`,
`StatefulEnv` and `PlayedEnv`; an environment needs no base class to have one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard

from rollout.records.trajectory import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call of a step, with its result.

    Attributes:
        query: arguments of the call, such as a search's query or a program.
        failed: True if the call failed; the result says why.
    """

    tool: str
    query: str
    result: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Reply of an environment to an action.

    Attributes:
        reward: reward of this step; the sum over the steps is the trajectory's outcome.
        answer: the team's answer so far, in a normal form, so that equal answers are equal texts
            where this is possible (see `PlayedEnv.same`); "" if there is none yet, None if the
            environment does not report answers.
        passages: passages that a search found, best first, as the observation shows them.
        metrics: metrics of the trajectory so far. An evaluation takes `solved` as the trajectory's
            success; without this metric it takes the outcome.
        unscored: True if the environment cannot score the action, because nobody knows the task's
            answers, as in a chat. Then `reward` is 0, and `metrics` is empty.
    """

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    answer: str | None = None
    tools: tuple[ToolCall, ...] = ()
    passages: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    unscored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Next decision in a game of several players.

    Attributes:
        player: agent whose turn it is.
        observation: everything that this agent has seen, without what is hidden from it.
    """

    player: str
    observation: str


class AgentMistake(ValueError):
    """An agent's text cannot be used.

    The agent reads the message, so it must not reveal the task's answers.
    """


class Env(Protocol):
    """World of one task, used by one trajectory. Every method may raise the errors of `step`."""

    def reset(self, task: Task) -> str:
        """Start a task; return the problem as the agents see it."""

    async def step(self, action: str) -> Step:
        """Apply an agent's text.

        Raises:
            EnvError: the environment or one of its tools failed for good.
            Undecided: the reward of the text is unknown.
        """


class ResourceEnv(Protocol):
    """Additional methods of an environment that holds a process, a session or a connection."""

    async def open(self, task: Task) -> None:
        """Acquire the resources; called before `reset`.

        An implementation may have a parameter `calls`, which gets the trajectory's `CallRecord`.
        """

    async def close(self) -> None:
        """Release the resources; called at the end, also if `open` failed or was never called."""


def is_resource_env(env: object) -> TypeGuard[ResourceEnv]:
    """Return True if an environment has both `open` and `close`.

    An environment with only one of them is neither opened nor closed.
    """
    return hasattr(env, "open") and hasattr(env, "close")


class StatefulEnv(Protocol):
    """Additional method of an environment that reports its state."""

    def state(self) -> str:
        """Return the current state as text, without the history that led to it.

        It is called after `reset` and after every step. Advantage estimators such as `at_grpo` use it
        to compare turns that were taken in the same state. If the state is "", or if the environment
        lacks this method, turns with the same prompt count as taken in the same state.
        """


Case = tuple[str, str]  # input and expected output of a program, as an agent writes them


class PlayedEnv(Env, Protocol):
    """Environment of an episode, as orchestras use it.

    All of these methods are there, but one that the task's environment lacks raises EnvError. An
    environment has `preview` if it can compute a step's reply without taking the step, `same` if
    equal answers may be different texts, `run` if agents may run programs before they answer,
    `files` and `forget` if programs share a process and leave files for each other, `check` and
    `agreement` if agents write tests, and `decision` if agents play against each other.
    """

    async def preview(self, action: str) -> Step:
        """Return the reply that `step` would give, without changing the world."""

    async def same(self, answer: str, other: str) -> bool:
        """Return True if two answers are known to be equal."""

    async def run(self, program: str) -> ToolCall:
        """Run an agent's Python program; the result is its output, with the error if it failed."""

    async def files(self) -> Mapping[str, int]:
        """Return the size in bytes of every file, by path."""

    async def forget(self) -> None:
        """End the process that programs share: variables are lost, files stay."""

    async def check(self, program: str, cases: Sequence[Case]) -> Step:
        """Run an agent's program on an agent's tests.

        Returns:
            A step with the result of each test as observation, the run as tool call, and the metric
            `check_rate`: the share of tests that pass; 0 if there are none.
        """

    async def decision(self) -> Decision:
        """Return whose turn it is in a game of several players, and what this player sees."""

    async def agreement(self, cases: Sequence[Case]) -> float | None:
        """Return the share of an agent's tests that the task's solution passes.

        It is 0 without tests, and None if the task has no solution.
        """


def last_tag(text: str, name: str) -> str | None:
    """Return the stripped content of the last complete `<name>…</name>`; None if there is none.

    The innermost opening tag counts, so an earlier tag that was never closed is skipped.
    """
    opening = f"<{name}>"
    closing = f"</{name}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    return text[start + len(opening) : end].strip()


def after_thought(text: str) -> str:
    """Return the text after the last `</think>`, or the whole text without one, stripped."""
    return text.rpartition("</think>")[2].strip()
