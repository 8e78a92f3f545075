"""Training of rows as their layouts say, and how far each is from plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mcore_mas.config.policy import LoraConfig
from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import ValueObjective
from mcore_mas.megatron.batch import CostModel
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from tests.exactness.rows import FEEDS, Row
from tests.support import lora, ranks, reference
from tests.support.gradients import full_gradients
from tests.support.precision import Errors, Expected, errors, expect

STEPS = 3
LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row's errors, and those of plain torch in float32 on the same task; both against float64."""

    errors: Errors
    own: Errors

    @property
    def beyond(self) -> dict[str, str]:
        """What is further off than allowed: the error and the bound by name."""
        return self.errors.exceeded(self.own)


def run(rows: Sequence[Row], folder: Path, others: Sequence[ranks.Job] = ()) -> None:
    """Train every row's layout for `STEPS` steps; `folder` gets what they came to.

    Args:
        others: further jobs for the same set of processes.
    """
    made = [
        job_of(row, folder, _train, {"out": folder / str(number)})
        for number, row in enumerate(rows)
    ]
    jobs = [*others, *made]
    write_models(rows, folder)
    jobs = sorted(
        jobs, key=lambda job: astuple(job.layout)
    )  # one layout's share their process groups
    (folder / "threads.json").write_text(json.dumps(ranks.run_jobs(jobs)))


def write_models(rows: Sequence[Row], folder: Path) -> None:
    """The models of rows, each once."""
    for row in {row.model: row for row in rows}.values():
        model_of(row, folder)


def job_of(
    row: Row, folder: Path, function: Callable[..., None], arguments: dict[str, Any]
) -> ranks.Job:
    """`function(rank, spec, row, **arguments)` on the row's ranks, with a trainer's settings on the row's model."""
    spec = ranks.make_spec(str(folder / row.model), **row.layout)
    if row.critic:
        spec = replace(spec, head="value", objective=ValueObjective())
    if row.lora:
        adapter = str(folder / row.model / "adapter")
        spec = replace(
            spec,
            lora=LoraConfig(rank=lora.RANK, alpha=lora.ALPHA, targets=row.lora, adapter=adapter),
        )
    sizes = {
        name: row.layout[name]
        for name in ("tp", "pp", "vpp", "cp", "dp", "ep")
        if name in row.layout
    }
    return ranks.Job(function=function, arguments={"spec": spec, "row": row, **arguments}, **sizes)


def model_of(row: Row, folder: Path) -> PreTrainedModel:
    """A row's model in plain torch, which is also written, with its adapter, into `folder`."""
    model = reference.make_model(row.family, folder / row.model, critic=row.critic, layers=LAYERS)
    if row.lora:
        lora.adapt(model, row.lora)
        lora.save(model, row.lora, folder / row.model / "adapter")
    return model


def samples_of(row: Row) -> list[Sample]:
    """What a row is trained on."""
    if row.deep:
        return reference.make_deep_samples()
    return reference.make_critic_samples() if row.critic else reference.make_samples()


def _train(rank: int, spec: TrainerSpec, row: Row, out: Path) -> None:
    batches = FEEDS[row.feed](samples_of(row), row.max_tokens, CostModel.of(spec))
    fresh = (
        replace(spec, lora=spec.lora.model_copy(update={"adapter": None}))
        if row.beside and spec.lora
        else None
    )
    other = MegatronTrainer(fresh) if fresh else None
    trainer = MegatronTrainer(spec, other)
    start = _tensors(trainer)
    if rank == 0:
        out.mkdir()
        torch.save(start, out / "start.pt")
    torch.distributed.barrier()
    for step in range(STEPS):
        if other is not None:
            other.update(batches)
        metrics = trainer.update(batches)
        tensors = {
            "gradients": {name: tensor.clone() for name, tensor in full_gradients(trainer)},
            "parameters": _tensors(trainer),
        }
        (out / f"metrics_{step}_{rank}.json").write_text(json.dumps(metrics))
        if rank == 0:
            torch.save(tensors, out / f"tensors_{step}.pt")


def _tensors(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """Full weights, adapters merged, and the adapters by themselves."""
    return ranks.copy_weights(trainer) | ranks.copy_stream(trainer.model.adapter())


def measure(rows: Sequence[Row], folder: Path) -> list[Measured]:
    """How far what `run` left in `folder` is from the reference, row by row.

    Raises:
        AssertionError: weights that were loaded do not come back bit for bit, the ranks of a row do not report the
            same metrics, or not the reference's tensors.
    """
    expected: dict[tuple[str, bool], Expected] = {}
    loaded: dict[str, dict[str, torch.Tensor]] = {}
    measured = []
    for number, row in enumerate(rows):
        if row.task not in expected:
            model = model_of(row, folder)
            loaded[row.model] = reference.tensors(model)
            loss_of = reference.value_loss_of if row.critic else reference.loss_of
            expected[row.task] = expect(model, samples_of(row), STEPS, ranks.LR, loss_of)
        start = torch.load(folder / str(number) / "start.pt", weights_only=True)
        assert set(start) == set(loaded[row.model]), row.name
        for name, tensor in loaded[row.model].items():
            same = (
                torch.allclose if row.lora and ".lora_" not in name else torch.equal
            )  # a sum in another order
            assert same(start[name], tensor), f"{row.name}: {name}"
        got = [_read(folder / str(number), step) for step in range(STEPS)]
        measured.append(
            Measured(errors=errors(got, expected[row.task].steps), own=expected[row.task].float32)
        )
    return measured


def _read(out: Path, step: int) -> dict[str, Any]:
    """What a row came to at one step, as `reference.train` gives it."""
    texts = {path.read_text() for path in out.glob(f"metrics_{step}_*.json")}
    assert len(texts) == 1, f"{out}: ranks report different metrics"
    metrics = json.loads(texts.pop())
    agents = ("a", "b")
    return {
        "loss": sum(metrics[f"agent/{agent}/loss"] for agent in agents),
        "norm": metrics["grad_norm"],
        "agent_norm": {agent: metrics[f"agent/{agent}/grad_norm"] for agent in agents},
        **torch.load(out / f"tensors_{step}.pt", weights_only=True),
    }
