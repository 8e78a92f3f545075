"""Stand-ins for ALFWorld and WebShop with the interfaces of their classes, as their sources have them."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any


class FakeHouse:
    """What `AlfredTWEnv.init_env(batch_size=1)` returns: a batch of one TextWorld game."""

    def __init__(self, game: str) -> None:
        self.game = game
        self.at = "fridge" if "near" in game else "table"

    def _infos(self, won: bool) -> dict[str, Any]:
        commands = ["go to fridge 1", "take apple 1 from fridge 1", "look"]
        return {"won": [won], "admissible_commands": [commands], "extra.gamefile": [self.game]}

    def reset(self) -> tuple[Sequence[str], Mapping[str, Any]]:
        return [
            "-= Welcome to TextWorld, ALFRED! =-\n\nYour task is to: take the apple.\n"
        ], self._infos(False)

    def step(
        self, actions: Sequence[str]
    ) -> tuple[Sequence[str], Sequence[float], Sequence[bool], Mapping[str, Any]]:
        [action] = actions
        won = action.startswith("take") and self.at == "fridge"
        known = action == "go to fridge 1" or won
        self.at = "fridge" if known else self.at
        text = "You win." if won else "You are at the fridge." if known else "Nothing happens."
        return [text], (float(won),), (won,), self._infos(won)

    def close(self) -> None:
        self.at = "closed"


class FakeAlfred:
    """The part of `AlfredTWEnv` that init_env reads: its config and its list of games."""

    made = 0

    def __init__(self, config: dict[str, Any], train_eval: str = "train") -> None:
        type(self).made += 1
        assert config["env"]["type"] == "AlfredTWEnv" and train_eval == "eval_out_of_distribution"
        self.config, self.game_files, self.num_games = config, ["all", "of", "them"], 3

    def init_env(self, batch_size: int) -> FakeHouse:
        assert batch_size == 1 and self.num_games == 1
        [game] = self.game_files
        return FakeHouse(game)


class FakeShop:
    """The interface of `WebAgentTextEnv` in text mode: (observation, reward, done, info) and no info."""

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
        # a gift has been chosen already
        self.page, self.chosen = ("item", self.goal) if self.goal == "a gift" else ("search", "")
        return f"WebShop [SEP] Instruction: [SEP] i need {self.goal} [SEP] Search", None

    def get_available_actions(self) -> dict[str, Any]:
        clickables = {
            "search": ["search"],
            "results": ["back to search", *self.server.goals],
            "item": ["buy now"],
        }
        return {"has_search_bar": self.page == "search", "clickables": clickables[self.page]}

    def step(self, action: str) -> tuple[str, float, bool, None]:
        reward, done = 0.0, False
        if action.startswith("search["):
            self.page = "results"
        elif action == "click[buy now]" and self.page == "item":
            reward, done = 1.0 if self.chosen == self.goal else 0.5, True
        elif self.page == "results":
            self.page, self.chosen = "item", action[6:-1]
        return f"{self.page} [SEP] {self.goal}", reward, done, None

    def close(self) -> None: ...


def modules() -> dict[str, ModuleType]:
    """Both packages as they would be imported, by name."""
    environment, envs = ModuleType("alfworld.agents.environment"), ModuleType("web_agent_site.envs")
    environment.get_environment = {"AlfredTWEnv": FakeAlfred}.__getitem__  # type: ignore[attr-defined]
    envs.WebAgentTextEnv = FakeShop  # type: ignore[attr-defined]
    parents = [ModuleType(name) for name in ("alfworld", "alfworld.agents", "web_agent_site")]
    return {module.__name__: module for module in (*parents, environment, envs)}


def install() -> None:
    """Put both packages where imports find them, for the rest of this process."""
    sys.modules.update(modules())
