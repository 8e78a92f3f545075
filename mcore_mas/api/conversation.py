"""Trajectories that show themselves in a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from rich.console import Console

from rollout.records.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Conversation(Trajectory):
    """A trajectory, with the advantages of its turns if they are known."""

    advantages: Mapping[tuple[str, str, int], float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, trajectory: Trajectory, advantages: Mapping[tuple[str, str, int], float]
    ) -> Conversation:
        """Convert a trajectory to a conversation.

        Args:
            trajectory: the trajectory.
            advantages: advantages of its turns, by trajectory, node and turn number; {} if unknown.
        """
        values = {field.name: getattr(trajectory, field.name) for field in fields(Trajectory)}
        return cls(**values, advantages=advantages)

    def show(self) -> None:
        """Print the messages of the agents, with rewards and advantages."""
        from mcore_mas.reports.trajectory_terminal import print_trajectory

        print_trajectory(self, Console(highlight=False), self.advantages)

    def __repr__(self) -> str:
        return f"Conversation({self.id!r}, {len(self.turns)} turns, outcome {self.outcome})"

    def _repr_html_(self) -> str:
        from mcore_mas.reports.page_templates import embed_page
        from mcore_mas.reports.trajectory_page import trajectory_page

        return embed_page(trajectory_page(self, self.advantages))
