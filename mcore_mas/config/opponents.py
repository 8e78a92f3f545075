"""Section of a config about an opponent: a frozen policy that plays one agent of a game now and then."""

from typing import Literal

from pydantic import Field

from rollout.base.section import Section


class PastConfig(Section):
    """Copies of a trained policy's earlier weights, with which an opponent plays.

    The first copy is the opponent's own model, which must be the model that the trained policy started from.
    """

    # Trained policy whose weights are copied.
    of: str
    # Training steps between two copies.
    every: int = Field(ge=1)
    # Number of newest copies from which each step chooses one.
    size: int = Field(8, ge=1)
    # "uniform": all with the same probability; "newest": the most recent; "rating": with a probability proportional to
    # the copy's expected score against the trained policy, computed from their Elo ratings.
    choose: Literal["uniform", "newest", "rating"] = "uniform"


class OpponentConfig(Section):
    """Games of the trained policies against one frozen policy, beside self-play."""

    # Probability that the opponent plays one of `agents` in the games of a task; each agent is equally likely.
    share: float = Field(0.5, gt=0, le=1)
    # Trained agents that the opponent plays; []: all.
    agents: list[str] = Field(default_factory=list)
    # None: the opponent plays with the weights of its own model in all steps.
    past: PastConfig | None = None
