"""Section of a config about the reward: an allocator and its penalties."""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from rollout.base.errors import OptionsError
from rollout.base.lookup import lookup
from rollout.base.options import Registry
from rollout.config.agents import AgentConfig
from rollout.config.choice import Choice, OptionsByName, check_agent_names, check_options_by_name
from rollout.records.trajectory import Group, Turn
from rollout.rewards import ALLOCATORS
from rollout.rewards.penalties import PENALTIES, apply_penalties, overlong

PENALTY_REGISTRY = Registry(kind="penalty", registered=PENALTIES, takes=("turn",))
PenaltyOptions = Annotated[
    OptionsByName, AfterValidator(partial(check_options_by_name, PENALTY_REGISTRY))
]


class RewardConfig(Choice):
    """The allocator, which makes rewards of turns from the outcomes of a group; and penalties of single replies."""

    registry = Registry(kind="reward", registered=ALLOCATORS, takes=("group",))

    penalties: PenaltyOptions = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _check_parameter(cls, name: str) -> str:
        """Refuse a function of one trajectory, which only the Python API calls."""
        first = next(iter(inspect.signature(cls.registry.find(name)).parameters), "")
        if first == "trajectory":
            raise OptionsError(
                f"reward '{name}' takes a trajectory, and a config's reward takes the group of all trajectories of a "
                "task: write a function of a group that returns it with a reward on every turn (docs/own_reward.md)"
            )
        return name

    def check_agents(self, team: Collection[str]) -> None:
        """Refuse options of shipped allocators and penalties that name an agent who is not in the team."""
        if self.name in ALLOCATORS:
            check_agent_names(f"reward '{self.name}'", self.options, team)
        for name, options in self.penalties.items():
            if name in PENALTIES:
                check_agent_names(f"penalty '{name}'", options, team)


def build_allocator(
    config: RewardConfig, agents: Mapping[str, AgentConfig]
) -> Callable[[Group], Group]:
    """Return a function that applies the allocator and then the penalties, and checks every reward."""
    max_tokens = {name: agent.max_tokens for name, agent in agents.items()}
    penalties: list[Callable[[Turn], float | None]] = []
    for name, options in config.penalties.items():
        penalty = lookup("penalty", name, PENALTIES)
        arguments = dict(options)
        if penalty is overlong:
            arguments["max_tokens"] = {**max_tokens, **(options.get("max_tokens") or {})}
        penalties.append(partial(penalty, **arguments))
    return partial(apply_penalties, allocate=config.call, penalties=penalties)
