"""A search environment that asks its retriever whatever is said: for a model that says nothing of sense."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.environments.protocol import Step, last_tag
from rollout.environments.search import SearchEnv


@dataclass(eq=False, kw_only=True)
class AskingEnv(SearchEnv):
    """Searches for the question, and how often it has asked, where no answer is given."""

    async def step(self, action: str) -> Step:
        if last_tag(action, "answer") is None:
            action = f"<search> {self.task.prompt} text {self._searches + 1} </search>"
        return await super().step(action)
