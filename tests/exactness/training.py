"""Training of rows in their layouts, and its errors against plain torch."""

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

STEPS = 3  # of a row in docs/exactness.md
TESTED_STEPS = (
    2  # of a row in tests: the second step has Adam's moments and the weights of the first
)
LAYERS = 4
AGENTS = ("a", "b")  # of the reference samples


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Errors of a row against plain torch in float64.

    Attributes:
        errors: of the row.
        plain_errors: of plain torch in float32 on the same task.
    """

    errors: Errors
    plain_errors: Errors

    @property
    def excessive(self) -> dict[str, str]:
        """Errors that are larger than allowed: error and bound, by name."""
        return self.errors.exceeded(self.plain_errors)


def train_rows(
    rows: Sequence[Row],
    folder: Path,
    other_jobs: Sequence[ranks.Job] = (),
    steps: int = STEPS,
    start_method: str = "forkserver",
) -> None:
    """Train each row for some steps, and write the results to `folder`.

    Args:
        rows: rows to train.
        folder: gets a subfolder for each row, by its index, and each rank's threads in threads.json.
        other_jobs: further jobs for the same set of processes.
        steps: number of steps of each row.
        start_method: of the processes; see `ranks.run_jobs`.
    """
    write_models(rows, folder)
    row_jobs = [
        make_job(row, folder, _train, {"out": folder / str(number), "steps": steps})
        for number, row in enumerate(rows)
    ]
    # Neighbouring jobs with the same layout share their process groups.
    jobs = sorted([*other_jobs, *row_jobs], key=lambda job: astuple(job.layout))
    threads = ranks.run_jobs(jobs, start_method)
    (folder / "threads.json").write_text(json.dumps(threads))


def write_models(rows: Sequence[Row], folder: Path) -> None:
    """Write the models of rows, each once."""
    row_by_model = {row.model: row for row in rows}
    for row in row_by_model.values():
        make_model(row, folder)


def make_job(
    row: Row, folder: Path, function: Callable[..., None], arguments: dict[str, Any]
) -> ranks.Job:
    """Return the job that calls function(rank, spec, row, **arguments) on the row's ranks.

    Args:
        row: its layout and model become the trainer's specification `spec`.
        folder: of the models.
        function: called on every rank.
        arguments: further arguments of the function.
    """
    spec = ranks.make_spec(str(folder / row.model), balance=row.balance, **row.layout)
    if row.critic:
        spec = replace(spec, head="value", objective=ValueObjective())
    if row.lora:
        adapter = str(folder / row.model / "adapter")
        config = LoraConfig(rank=lora.RANK, alpha=lora.ALPHA, targets=row.lora, adapter=adapter)
        spec = replace(spec, lora=config)
    sizes = {
        name: row.layout[name]
        for name in ("tp", "pp", "vpp", "cp", "dp", "ep")
        if name in row.layout
    }
    return ranks.Job(function=function, arguments={"spec": spec, "row": row, **arguments}, **sizes)


def make_model(row: Row, folder: Path) -> PreTrainedModel:
    """Return a row's model in plain torch, and write it to `folder`, with its adapter if it has one."""
    model = reference.make_model(row.family, folder / row.model, critic=row.critic, layers=LAYERS)
    if row.lora:
        lora.adapt(model, row.lora)
        lora.save(model, row.lora, folder / row.model / "adapter")
    return model


def make_samples(row: Row) -> list[Sample]:
    """Return the samples that a row is trained on."""
    if row.deep:
        return reference.make_deep_samples()
    if row.critic:
        return reference.make_critic_samples()
    return reference.make_samples()


def _train(rank: int, spec: TrainerSpec, row: Row, out: Path, steps: int) -> None:
    """Train a row; every rank writes its metrics, and rank 0 writes gradients and weights."""
    batches = FEEDS[row.feed](make_samples(row), row.max_tokens, CostModel.of(spec))
    base_trainer = None
    if row.shared_base:
        assert spec.lora is not None
        new_adapter = spec.lora.model_copy(update={"adapter": None})
        base_trainer = MegatronTrainer(replace(spec, lora=new_adapter))
    trainer = MegatronTrainer(spec, base_trainer)
    initial = _weights(trainer)
    if rank == 0:
        out.mkdir()
        torch.save(initial, out / "initial.pt")
    torch.distributed.barrier()
    for step in range(steps):
        if base_trainer is not None:
            base_trainer.update(batches)
        metrics = trainer.update(batches)
        tensors = {
            "gradients": {name: tensor.clone() for name, tensor in full_gradients(trainer)},
            "parameters": _weights(trainer),
        }
        (out / f"metrics_{step}_{rank}.json").write_text(json.dumps(metrics))
        if rank == 0:
            torch.save(tensors, out / f"tensors_{step}.pt")


def _weights(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """Return the full weights with adapters merged, and the adapters."""
    return ranks.copy_weights(trainer) | ranks.copy_stream(trainer.model.adapter())


def measure_rows(rows: Sequence[Row], folder: Path, steps: int = STEPS) -> list[Measurement]:
    """Return the errors of each row, from the results that `train_rows` has written to `folder`.

    Raises:
        AssertionError: loaded weights do not come back bit for bit, the ranks of a row report
            different metrics, or the tensors are not those of the reference.
    """
    expected: dict[tuple[str, bool, bool], Expected] = {}
    loaded: dict[str, dict[str, torch.Tensor]] = {}
    measurements = []
    for number, row in enumerate(rows):
        if row.task not in expected:
            model = make_model(row, folder)
            loaded[row.model] = reference.tensors(model)
            loss_of = reference.value_loss_of if row.critic else reference.loss_of
            expected[row.task] = expect(
                model, make_samples(row), steps, ranks.LR, loss_of, row.balance
            )

        _check_initial_weights(row, folder / str(number), loaded[row.model])
        task = expected[row.task]
        history = [_read_step(folder / str(number), step) for step in range(steps)]
        measurements.append(
            Measurement(errors=errors(history, task.steps), plain_errors=task.float32)
        )
    return measurements


def _check_initial_weights(row: Row, out: Path, loaded: dict[str, torch.Tensor]) -> None:
    """Assert that a row's trainer had the weights of its model before the first step."""
    initial = torch.load(out / "initial.pt", weights_only=True)
    assert set(initial) == set(loaded), row.name
    for name, tensor in loaded.items():
        # Merged weights are sums, whose order of addition differs.
        is_merged = bool(row.lora) and ".lora_" not in name
        is_equal = torch.allclose if is_merged else torch.equal
        assert is_equal(initial[name], tensor), f"{row.name}: {name}"


def _read_step(out: Path, step: int) -> dict[str, Any]:
    """Return the results of a step in the form of `reference.train`."""
    texts = {path.read_text() for path in out.glob(f"metrics_{step}_*.json")}
    assert len(texts) == 1, f"{out}: ranks report different metrics"
    metrics = json.loads(texts.pop())
    tensors = torch.load(out / f"tensors_{step}.pt", weights_only=True)
    return {**losses_and_norms(metrics), **tensors}


def losses_and_norms(metrics: dict[str, float]) -> dict[str, Any]:
    """Return loss and norms of an update in the form of `reference.train`."""
    return {
        "loss": sum(metrics[f"agent/{agent}/loss"] for agent in AGENTS),
        "norm": metrics["grad_norm"],
        "agent_norm": {agent: metrics[f"agent/{agent}/grad_norm"] for agent in AGENTS},
    }
