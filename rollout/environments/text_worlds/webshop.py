"""WebShop: finding and buying a product (arXiv 2207.01206), by its package's WebAgentTextEnv."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from typing import Any

from rollout.environments.text_worlds.world import BadAction, EnvError, MissingLibrary, Scene

_SESSIONS = count()  # of this process: the shop tells its visitors apart by name


@cache
def shop_thread() -> ThreadPoolExecutor:
    """The thread of the shop, whose search engine is one for all trajectories."""
    return ThreadPoolExecutor(1, thread_name_prefix="webshop")


class WebshopWorld:
    """One errand; its key is the number of its goal."""

    def __init__(self, num_products: int | None) -> None:
        """`num_products` is how many the shop has, 100, 1000 or 100000; None: all."""
        self._num_products = num_products
        self._env: Any = None

    def start(self, key: str) -> Scene:
        if not key.isdecimal():
            raise EnvError(f"the key of an errand is the number of its goal, and not {key[:40]!r}")
        make, server = _shop(self._num_products)
        if int(key) >= len(server.goals):
            raise EnvError(f"the shop has {len(server.goals)} goals, and no goal {key}")
        prefix = f"{next(_SESSIONS)}-"
        self._env = make(observation_mode="text", num_products=self._num_products, server=server, session_prefix=prefix)
        text, _ = self._env.reset(session=int(key))
        return Scene(text=text, choices=self._choices())

    def act(self, action: str) -> Scene:
        if not (action.startswith(("search[", "click[")) and action.endswith("]")):
            raise BadAction("This is no action; expected search[words] or click[what can be clicked].")
        text, reward, done, _ = self._env.step(action)
        choices = () if done else self._choices()
        return Scene(text=text, reward=float(reward), done=bool(done), solved=done and reward == 1, choices=choices)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _choices(self) -> tuple[str, ...]:
        able = self._env.get_available_actions()
        search = ("search[words]",) if able["has_search_bar"] else ()
        return (*search, *(f"click[{what}]" for what in able["clickables"] if what != "search"))


@cache
def _shop(num_products: int | None) -> tuple[Any, Any]:
    """The class of the environment and the shop behind it, which reads its products when it is made."""
    try:
        from web_agent_site.envs import WebAgentTextEnv
    except ImportError as error:
        where = "https://github.com/princeton-nlp/WebShop"
        raise MissingLibrary(
            f"env webshop needs the package web_agent_site: install {where} by its setup.sh"
        ) from error
    return WebAgentTextEnv, WebAgentTextEnv(observation_mode="text", num_products=num_products).server
