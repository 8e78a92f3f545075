"""Every family and layout trains as a plain Hugging Face model does: loss, gradient norms, parameters."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support import precision, ranks, reference

STEPS = 3
LAYOUTS = [
    ("qwen2", 1, 1000),
    ("qwen2", 2, 12),
    ("qwen3", 1, 12),
    ("qwen3", 2, 1000),
    ("llama", 1, 1000),
    ("llama", 2, 12),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what every layout, and every resumed run, came to."""
    folder = tmp_path_factory.mktemp("runs")
    samples = reference.make_samples()
    jobs = []
    for family in reference.FAMILIES:
        reference.make_model(family, folder / family)

    def job(
        function: Callable[..., None], family: str, tp: int, out: str, **arguments: object
    ) -> None:
        spec = ranks.make_spec(str(folder / family), tp=tp)
        arguments = {"spec": spec, "out": folder / out, "samples": samples, **arguments}
        jobs.append(ranks.Job(function=function, arguments=arguments, tp=tp))

    for family, tp, max_tokens in LAYOUTS:
        job(ranks.train, family, tp, f"{family}_{tp}", steps=STEPS, max_tokens=max_tokens)
    job(ranks.train, "qwen2", 2, "unbroken", steps=STEPS, max_tokens=64)
    for tp in (1, 2):
        job(
            ranks.resume,
            "qwen2",
            tp,
            f"resumed_{tp}",
            checkpoint=folder / "unbroken/checkpoint",
            steps=STEPS - 1,
        )
    ranks.run_jobs(jobs)
    return folder


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp", "max_tokens"), LAYOUTS)
def test_trains_like_hugging_face(
    runs: Path, family: str, tp: int, max_tokens: int, tmp_path: Path
) -> None:
    model = reference.make_model(family, tmp_path / "model")
    expected = precision.expect(model, reference.make_samples(), STEPS, ranks.LR)
    precision.compare(runs / f"{family}_{tp}", expected)


@pytest.mark.multirank
@pytest.mark.slow
def test_checkpoint_of_tp2_continues_at_tp1_and_tp2(runs: Path, tmp_path: Path) -> None:
    model = reference.make_model("qwen2", tmp_path)
    float32_errors = precision.expect(model, reference.make_samples(), STEPS, ranks.LR).float32
    unbroken = torch.load(runs / f"unbroken/weights_{STEPS - 1}.pt", weights_only=True)
    for tp in (1, 2):
        resumed = torch.load(runs / f"resumed_{tp}/weights.pt", weights_only=True)
        if tp == 2:
            assert precision.gap(resumed, unbroken) == 0  # the same layout resumes to the bit
        else:
            assert precision.gap(resumed, unbroken) <= precision.bound(float32_errors.parameters)
