"""Memory that is given away comes back under every view of it."""

import torch

from mcore_mas.megatron.state.reference import Offload, OffloadedTensors


def test_parked_storages_are_empty_and_come_back_under_every_view() -> None:
    whole = torch.arange(6.0)
    part, alone, nothing = whole[2:4], torch.tensor([7], dtype=torch.int64), torch.empty(0)
    parked = OffloadedTensors([whole, part, alone, nothing])
    assert parked.nbytes == 6 * 4 + 8
    assert [x.untyped_storage().nbytes() for x in (whole, part, alone)] == [0, 0, 0]
    parked.restore()
    assert (whole.tolist(), part.tolist(), alone.tolist()) == ([0, 1, 2, 3, 4, 5], [2, 3], [7])
    whole[2] = 9.0
    assert part.tolist() == [9, 3]


def test_on_the_cpu_gradients_are_given_away_and_come_back_as_zeros() -> None:
    gradients, weights = torch.ones(100), torch.ones(50)
    view = gradients[:10]
    offload = Offload([gradients], lambda: [weights])
    assert offload.sleep() == 400
    assert (gradients.untyped_storage().nbytes(), weights.tolist()) == (0, [1.0] * 50)
    offload.wake()
    assert view.tolist() == [0.0] * 10
    gradients[0] = 5.0
    assert view[0] == 5.0
