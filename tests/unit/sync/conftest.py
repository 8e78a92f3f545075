"""What tests of weight sync share."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.support.three_tensors import tensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the tensors' names and shapes."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors(), str(folder / "model.safetensors"))
    return folder
