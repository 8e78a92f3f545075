"""Fixtures of the tests of weight sync."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.support.three_tensors import tensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model folder with the three tensors."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors(), str(folder / "model.safetensors"))
    return folder
