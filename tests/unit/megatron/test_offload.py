"""Memory that is given away comes back under every view of it."""

import torch

from mcore_mas.megatron.state.optimizer import Offload


def test_what_is_kept_comes_back_under_every_view() -> None:
    whole = torch.arange(6.0)
    part, alone, nothing = whole[2:4], torch.tensor([7], dtype=torch.int64), torch.empty(0)
    offload = Offload([], lambda: [whole, part, alone, nothing])
    assert offload.sleep() == 6 * 4 + 8
    assert [x.untyped_storage().nbytes() for x in (whole, part, alone)] == [0, 0, 0]
    offload.wake()
    assert (whole.tolist(), part.tolist(), alone.tolist()) == ([0, 1, 2, 3, 4, 5], [2, 3], [7])
    whole[2] = 9.0
    assert part.tolist() == [9, 3]


def test_gradients_come_back_as_zeros() -> None:
    gradients = torch.ones(100)
    view = gradients[:10]
    offload = Offload([gradients], list)
    assert offload.sleep() == 400
    assert gradients.untyped_storage().nbytes() == 0
    offload.wake()
    assert view.tolist() == [0.0] * 10
    gradients[0] = 5.0
    assert view[0] == 5.0
