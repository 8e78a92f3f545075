"""The rollout side's config sections: who is in the team, in which world, and how it is rewarded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.agent import ROLES
from rollout.envs import ENVS
from rollout.orchestras import ORCHESTRAS
from rollout.registry import lookup
from rollout.rewards import ALLOCATORS


class Section(BaseModel):
    """A part of a config: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Choice(Section):
    """Something chosen by name, with keyword options that its function understands."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    def check(self, kind: str, known: dict[str, Callable[..., Any]], *given: str) -> None:
        """Refuse an unknown name, or options that the chosen function does not take.

        Args:
            given: keyword arguments that are supplied at run time and so are not options.
        """
        parameters = inspect.signature(lookup(kind, self.name, known)).parameters.values()
        options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in given]
        for name in self.options:
            if name not in options:
                known_options = ", ".join(options) or "none"
                raise ValueError(f"{kind} '{self.name}' has no option '{name}'; its options: {known_options}")


class OrchestraConfig(Choice):
    """Who speaks when."""

    @model_validator(mode="after")
    def _known(self) -> OrchestraConfig:
        self.check("orchestra", ORCHESTRAS)
        return self


class EnvConfig(Choice):
    """The world the team acts in."""

    @model_validator(mode="after")
    def _known(self) -> EnvConfig:
        self.check("env", ENVS, "retriever")
        return self


class RewardConfig(Choice):
    """How a trajectory's outcome becomes a reward per turn."""

    @model_validator(mode="after")
    def _known(self) -> RewardConfig:
        self.check("reward", ALLOCATORS)
        return self


class AgentConfig(Section):
    """What changes behaviour or credit belongs to an agent."""

    policy: str  # which policy it plays
    role: str = ""  # name in ROLES; "" is the agent's own name
    system: str | None = None  # replaces the role's system prompt
    user: str | None = None  # replaces the role's user template
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_tokens: int = Field(512, ge=1)  # of one reply
    loss_weight: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _known(self) -> AgentConfig:
        if self.role:
            lookup("agent role", self.role, ROLES)
        return self


class EngineConfig(Section):
    """The size of each policy's rollout engine."""

    slots: int = Field(128, ge=1)  # requests decoded at once
    max_length: int = Field(512, ge=2)  # tokens of prompt and reply
