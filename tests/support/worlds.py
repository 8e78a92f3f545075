"""Fakes of ALFWorld and WebShop with the interfaces of their classes."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any


class FakeHouse:
    """Batch of one TextWorld game, as `AlfredTWEnv.init_env(batch_size=1)` returns it."""

    def __init__(self, game: str) -> None:
        self.game = game
        self.position = "fridge" if "near" in game else "table"

    def _infos(self, won: bool) -> dict[str, Any]:
        commands = ["go to fridge 1", "take apple 1 from fridge 1", "look"]
        return {"won": [won], "admissible_commands": [commands], "extra.gamefile": [self.game]}

    def reset(self) -> tuple[Sequence[str], Mapping[str, Any]]:
        text = "-= Welcome to TextWorld, ALFRED! =-\n\nYour task is to: take the apple.\n"
        return [text], self._infos(False)

    def step(
        self, actions: Sequence[str]
    ) -> tuple[Sequence[str], Sequence[float], Sequence[bool], Mapping[str, Any]]:
        [action] = actions
        won = action.startswith("take") and self.position == "fridge"
        if won:
            text = "You win."
        elif action == "go to fridge 1":
            self.position = "fridge"
            text = "You are at the fridge."
        else:
            text = "Nothing happens."
        return [text], (float(won),), (won,), self._infos(won)

    def close(self) -> None:
        self.position = "closed"


class FakeAlfred:
    """Fake of `AlfredTWEnv` with a config and a list of games.

    Attributes:
        made: number of instances.
    """

    made = 0

    def __init__(self, config: dict[str, Any], train_eval: str = "train") -> None:
        type(self).made += 1
        assert config["env"]["type"] == "AlfredTWEnv" and train_eval == "eval_out_of_distribution"
        self.config = config
        self.game_files = ["all", "of", "them"]
        self.num_games = 3

    def init_env(self, batch_size: int) -> FakeHouse:
        assert batch_size == 1 and self.num_games == 1
        [game] = self.game_files
        return FakeHouse(game)


class FakeShop:
    """Fake of `WebAgentTextEnv` in text mode.

    Attributes:
        loaded: number of instances that loaded the shop's data.
    """

    loaded = 0

    def __init__(
        self, observation_mode: str = "html", file_path: str = "", server: Any = None, **kwargs: Any
    ) -> None:
        assert observation_mode == "text"
        type(self).loaded += server is None
        self.server = server or SimpleNamespace(
            goals=["red shoes", "blue hat", "a gift"], sessions={}
        )
        self.prefix = kwargs.get("session_prefix")
        self.reset()

    def reset(self, session: Any = None, instruction_text: str | None = None) -> tuple[str, None]:
        number = session if isinstance(session, int) else random.randrange(3)
        self.session = f"{self.prefix or ''}{session}"
        assert session is None or self.session not in self.server.sessions
        self.server.sessions[self.session] = self.goal = self.server.goals[number]
        if self.goal == "a gift":  # already chosen
            self.page = "item"
            self.chosen = self.goal
        else:
            self.page = "search"
            self.chosen = ""
        return f"WebShop [SEP] Instruction: [SEP] i need {self.goal} [SEP] Search", None

    def get_available_actions(self) -> dict[str, Any]:
        clickables = {
            "search": ["search"],
            "results": ["back to search", *self.server.goals],
            "item": ["buy now"],
        }
        return {"has_search_bar": self.page == "search", "clickables": clickables[self.page]}

    def step(self, action: str) -> tuple[str, float, bool, None]:
        reward = 0.0
        done = False
        if action.startswith("search["):
            self.page = "results"
        elif action == "click[buy now]" and self.page == "item":
            reward = 1.0 if self.chosen == self.goal else 0.5
            done = True
        elif self.page == "results":
            self.page = "item"
            self.chosen = action.removeprefix("click[").removesuffix("]")
        return f"{self.page} [SEP] {self.goal}", reward, done, None

    def close(self) -> None: ...


get_environment = {"AlfredTWEnv": FakeAlfred}.__getitem__  # of `alfworld.agents.environment`


def modules() -> dict[str, ModuleType]:
    """Return the modules of both packages, by name."""
    environment = ModuleType("alfworld.agents.environment")
    envs = ModuleType("web_agent_site.envs")
    environment.get_environment = get_environment  # type: ignore[attr-defined]
    envs.WebAgentTextEnv = FakeShop  # type: ignore[attr-defined]
    parents = [ModuleType(name) for name in ("alfworld", "alfworld.agents", "web_agent_site")]
    return {module.__name__: module for module in (*parents, environment, envs)}


def install() -> None:
    """Make both packages importable for the rest of this process."""
    sys.modules.update(modules())
