"""Copies of the weights of earlier versions, which score the tokens that they sampled, on one rank."""

from pathlib import Path

import pytest
import torch

from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from tests.support import ranks, reference

pytestmark = pytest.mark.usefixtures("one_rank")


def test_earlier_weights_score_with_the_same_bits_and_the_present_ones_come_back(
    tmp_path: Path,
) -> None:
    reference.make_model("qwen2", tmp_path)
    trainer = MegatronTrainer(ranks.make_spec(str(tmp_path), lr=1e-2))
    batches = pack(reference.make_samples(), 1000)
    scores_of_version = {}
    for version in range(4):
        scores_of_version[version] = trainer.score(batches)
        trainer.keep_version(version, 2)
        trainer.update(batches)
    present = trainer.score(batches)
    weights = ranks.copy_weights(trainer)

    assert not torch.equal(present[0], scores_of_version[3][0])
    for version in (2, 3):
        for score, expected in zip(
            trainer.score(batches, version=version), scores_of_version[version], strict=True
        ):
            assert torch.equal(score, expected)
    with pytest.raises(KeyError):  # only the newest two are kept
        trainer.score(batches, version=1)

    assert all(torch.equal(*pair) for pair in zip(trainer.score(batches), present, strict=True))
    after = ranks.copy_weights(trainer)
    assert all(torch.equal(after[name], weight) for name, weight in weights.items())
