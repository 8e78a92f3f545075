"""Training of every family compared with plain Hugging Face models: loss, gradient norms, parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import precision, ranks, reference

STEPS = 3
# Family, tensor-parallel ranks, and maximum tokens of a micro-batch.
TRAININGS = [
    ("qwen2", 1, 1000),
    ("qwen2", 2, 12),
    ("qwen3", 1, 12),
    ("qwen3", 2, 1000),
    ("llama", 1, 1000),
    ("llama", 2, 12),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all trainings; return the folder with a subfolder for each."""
    folder = tmp_path_factory.mktemp("results")
    for family in reference.FAMILIES:
        reference.make_model(family, folder / family)
    samples = reference.make_samples()
    jobs = []

    def add_job(
        function: Callable[..., None], family: str, tp: int, out: str, **arguments: Any
    ) -> None:
        spec = ranks.make_spec(str(folder / family), tp=tp)
        arguments |= {"spec": spec, "out": folder / out, "samples": samples}
        jobs.append(ranks.Job(function=function, arguments=arguments, tp=tp))

    for family, tp, max_tokens in TRAININGS:
        add_job(ranks.train, family, tp, f"{family}_{tp}", steps=STEPS, max_tokens=max_tokens)
    add_job(ranks.train, "qwen2", 2, "saved", steps=STEPS, max_tokens=64)
    checkpoint = folder / "saved" / "checkpoint"
    for tp in (1, 2):
        add_job(ranks.resume, "qwen2", tp, f"resumed_{tp}", checkpoint=checkpoint, steps=STEPS - 1)
    ranks.run_jobs(jobs)
    return folder


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp", "max_tokens"), TRAININGS)
def test_trains_like_hugging_face(
    results: Path, family: str, tp: int, max_tokens: int, tmp_path: Path
) -> None:
    model = reference.make_model(family, tmp_path / "model")
    expected = precision.expect(model, reference.make_samples(), STEPS, ranks.LR)
    precision.compare(results / f"{family}_{tp}", expected)


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_checkpoint_of_two_ranks_is_resumed(results: Path, tp: int, tmp_path: Path) -> None:
    weights = torch.load(results / "saved" / f"weights_{STEPS - 1}.pt", weights_only=True)
    resumed = torch.load(results / f"resumed_{tp}" / "weights.pt", weights_only=True)
    bound = 0.0  # the same layout is resumed bit for bit
    if tp == 1:
        model = reference.make_model("qwen2", tmp_path)
        expected = precision.expect(model, reference.make_samples(), STEPS, ranks.LR)
        bound = precision.bound(expected.float32.parameters)
    assert precision.gap(resumed, weights) <= bound
