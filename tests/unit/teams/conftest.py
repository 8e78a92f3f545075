"""The chat template that most tests of teams use."""

from pathlib import Path

import pytest

from rollout.models.chat_template import Renderer
from tests.support.templates import renderer_of


@pytest.fixture
def qwen(tmp_path: Path) -> Renderer:
    return renderer_of("qwen2.5", tmp_path)
