"""ALFWorld: household tasks in TextWorld (arXiv 2010.03768), by its package's AlfredTWEnv."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rollout.environments.text_worlds.world import EnvError, MissingLibrary, Scene


class AlfworldWorld:
    """One game; its key is the path of its `game.tw-pddl`."""

    def __init__(self, config: str) -> None:
        """`config` is ALFWorld's own file, such as its `configs/base_config.yaml`."""
        self._config = config
        self._env: Any = None
        self._score = 0.0

    def start(self, key: str) -> Scene:
        if not Path(key).is_file():
            raise EnvError(f"{key}: no such game; run `alfworld-download`")
        games = copy.copy(_games(self._config))  # which lists the games of a folder: here it has one
        games.game_files, games.num_games = [key], 1
        self._env = games.init_env(batch_size=1)
        observations, infos = self._env.reset()
        return Scene(text=observations[0].strip(), choices=_choices(infos))

    def act(self, action: str) -> Scene:
        observations, scores, dones, infos = self._env.step([action])
        before, self._score = self._score, float(scores[0])  # scores are of the whole game so far
        won = bool(infos["won"][0])
        return Scene(
            text=observations[0].strip(),
            reward=self._score - before,
            done=bool(dones[0]) or won,
            solved=won,
            choices=_choices(infos),
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def _choices(infos: Any) -> tuple[str, ...]:
    return tuple(infos["admissible_commands"][0])


@cache
def _games(config: str) -> Any:
    """An AlfredTWEnv, which reads a folder of games when it is made."""
    try:
        from alfworld.agents.environment import get_environment
    except ImportError as error:
        raise MissingLibrary("env alfworld needs `pip install alfworld`, and then `alfworld-download`") from error
    path = Path(config)
    if not path.is_file():
        raise EnvError(f"{config}: no such file; expected ALFWorld's configs/base_config.yaml")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    # without the handcoded expert, whom only the split `train` has
    return get_environment("AlfredTWEnv")(settings, train_eval="eval_out_of_distribution")
