"""Rotary position embedding (RoPE, arXiv 2104.09864) at the positions of prefix trees."""

from typing import cast

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor


class TreeRotary(RotaryEmbedding):
    """Rotary embedding at explicit positions, because a segment continues its parent's positions.

    Attributes:
        position_ids: [T], set for each micro-batch.
        position_count: number of positions for which angles are computed, larger than every position
            id. It is a Python number, because reading it from the GPU would make the host wait.
    """

    position_ids: Tensor
    position_count: int

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: object = None
    ) -> Tensor:
        """Return the angles of the current micro-batch; Megatron's arguments are not used.

        Returns:
            On a GPU the angles [T, 1, 1, head_dim], equal in the first and the second half of a
            head; on a CPU their cosines and sines [T, 1, 1, 2 head_dim], for `rotate_on_cpu`.
        """
        angles_by_position = self.get_emb(self.position_count)  # [position_count, 1, 1, head_dim]
        angles = cast(Tensor, angles_by_position[self.position_ids])
        if angles.device.type != "cpu":
            return angles
        half = angles[..., : angles.shape[-1] // 2]
        cos = half.cos()
        sin = half.sin()
        return torch.cat([cos, cos, -sin, sin], dim=-1)
