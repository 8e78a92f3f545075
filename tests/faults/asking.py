"""Search environment that searches at every step, because the replies of random models contain no searches."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.environments.protocol import Step, last_tag
from rollout.environments.search import SearchEnv


@dataclass(eq=False, kw_only=True)
class AskingEnv(SearchEnv):
    """Environment that searches for the question if a reply has no answer, each time by another query."""

    async def step(self, action: str) -> Step:
        if last_tag(action, "answer") is None:
            action = f"<search> {self.task.prompt} text {self._searches + 1} </search>"
        return await super().step(action)
