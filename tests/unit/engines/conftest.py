"""Models for tests of engines, and SGLang engines on fake servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollout.base.terminal import say

if TYPE_CHECKING:
    from rollout.engines.sglang.engine import SGLangEngine

FAKE = Path(__file__).parents[2] / "support" / "fake_sglang.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model.

    Each module has another folder, because tests write orders for their fake servers into it.
    """
    from tests.support.tiny import make_model

    path = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random Qwen2 model, which no test changes."""
    from tests.support.embedded import make_qwen2

    path = tmp_path_factory.mktemp("qwen2")
    make_qwen2(0).save_pretrained(path)
    return path


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Iterator[Callable[..., SGLangEngine]]:
    """Return a function that makes SGLang engines on fake servers; they are closed at the end."""
    from rollout.engines.sglang.engine import SGLangEngine
    from rollout.engines.sglang.settings import SGLangSettings

    engines: list[SGLangEngine] = []

    def make_engine(
        *, tell: Any = say, restart_guard: Any = nullcontext, **settings: Any
    ) -> SGLangEngine:
        defaults = {
            "folder": folder,
            "max_length": 64,
            "rows": 4,
            "python": str(FAKE),
            "start_s": 60.0,
            "weights_folder": tmp_path / "weights",
            "log": tmp_path / "server.log",
            "compare_servers": False,  # fake servers have no weights
        }
        engine = SGLangEngine(
            SGLangSettings(**(defaults | settings)), restart_guard=restart_guard, tell=tell
        )
        engines.append(engine)
        return engine

    yield make_engine
    for engine in engines:
        engine.close()
