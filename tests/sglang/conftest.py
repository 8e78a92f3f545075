"""What tests of the tensor transport need without a GPU."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def shared_by_name() -> Iterator[None]:
    """CPU memory goes to an unrelated process by name; a GPU's goes by handle, whatever this says."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)
