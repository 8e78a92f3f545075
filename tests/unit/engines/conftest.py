"""Models that engines are tested with, each made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollout.base.processes import say

if TYPE_CHECKING:
    from rollout.engines.sglang.engine import SGLangEngine

FAKE = Path(__file__).parents[2] / "support" / "fake_sglang.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model; a module's own, as tests put orders for their servers beside it."""
    from tests.support.tiny import make_model

    path = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 that nobody changes."""
    from tests.support.embedded import make_qwen2

    path = tmp_path_factory.mktemp("qwen2")
    make_qwen2(0).save_pretrained(path)
    return path


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Iterator[Callable[..., SGLangEngine]]:
    """SGLang engines of pretended servers, closed at the end."""
    from rollout.engines.sglang.engine import SGLangEngine
    from rollout.engines.sglang.settings import SGLangSettings

    made: list[SGLangEngine] = []

    def engine(
        *, tell: Any = say, restart_guard: Any = nullcontext, **settings: Any
    ) -> SGLangEngine:
        where = {
            "folder": folder,
            "max_length": 64,
            "rows": 4,
            "python": str(FAKE),
            "start_s": 60.0,
            "weights_folder": tmp_path / "weights",
            "log": tmp_path / "server.log",
            "verify": False,  # these servers have no weights
        }
        checked = SGLangSettings(**(where | settings))
        made.append(SGLangEngine(checked, restart_guard=restart_guard, tell=tell))
        return made[-1]

    yield engine
    for one in made:
        one.close()
