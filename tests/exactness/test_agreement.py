"""In bfloat16 right weights agree, shallow and deep, and a tensor that was left behind does not."""

from pathlib import Path

import pytest

from tests.exactness.agreement import DEPTHS, compared, stops, trained

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers", (DEPTHS[0], DEPTHS[-2])
)  # `make exactness` measures the others too
def test_right_weights_go_on_and_a_stale_tensor_stops(layers: int, tmp_path: Path) -> None:
    known = trained(layers)
    right, stale = list(known.stale)[:2]
    found = compared(known, {name: known.stale[name] for name in (right, stale)}, tmp_path)
    assert found[right]["agent/solver/logprob_gap_max"] > 0  # the two do round differently
    assert not stops(found[right])
    assert stops(found[stale]).startswith("agent/solver: ")
