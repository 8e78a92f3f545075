"""Bounds on rounding errors: a factor times plain float32's own error, measured against float64.

The error of plain float32 is measured in the same run. A fixed tolerance would only suit the machine
on which it was found, because kernels sum in another order on another CPU.
"""

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

from mcore_mas.credit.samples import Sample
from tests.support import reference

FACTOR = 4  # allowed error over plain float32's own error
EPS = 2.0**-23  # lower bound of plain float32's relative error: one rounding


def bound(float32_error: float) -> float:
    """Return the largest allowed relative error, given that of plain float32."""
    return FACTOR * max(float32_error, EPS)


def relative(computed: Tensor, exact: Tensor) -> float:
    """Return |x − x̂|₂ / |x̂|₂ in float64."""
    return float((computed.double() - exact).norm() / exact.norm())


def assert_close(computed: Tensor, float32: Tensor, exact: Tensor) -> None:
    """Assert that `computed` is about as near to `exact` (float64) as plain `float32` is."""
    error = relative(computed, exact)
    allowed = bound(relative(float32, exact))
    assert error <= allowed, f"{error:.1e} from float64; plain float32 allows {allowed:.1e}"


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Largest relative errors of a training over all its steps.

    Attributes:
        gradients: of one tensor, |g − ĝ|₂ / max(|ĝ|₂, 1 % of the norm of all gradients). The floor
            is needed because the true gradient of a key bias is 0.
        parameters: of one tensor, |p − p̂|∞ / |p̂|∞.
    """

    loss: float
    norm: float
    agent_norms: float
    gradients: float
    parameters: float

    def exceeded(self, float32: "Errors") -> dict[str, str]:
        """Return the error and its bound, by name, where plain float32 does not allow the error."""
        exceeded = {}
        for name, float32_error in asdict(float32).items():
            error = getattr(self, name)
            allowed = bound(float32_error)
            if not error <= allowed:  # also if it is NaN
                exceeded[name] = f"{error:.1e} > {allowed:.1e}"
        return exceeded


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A training in plain torch.

    Attributes:
        steps: results of each step in float64; see `reference.train`.
        float32: errors of plain float32.
    """

    steps: list[dict[str, Any]]
    float32: Errors


def _split_linear(parts: int) -> AbstractContextManager[object]:
    """Sum the products of linear layers over `parts` parts of their inputs, as tensor parallelism.

    Patches torch inside the block.
    """
    whole_linear = torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        inputs = x.chunk(parts, -1)
        columns = weight.chunk(parts, -1)
        total = whole_linear(inputs[0], columns[0])
        for part, matrix in zip(inputs[1:], columns[1:], strict=True):
            total = total + whole_linear(part, matrix)
        return total if bias is None else total + bias

    return mock.patch.object(torch.nn.functional, "linear", linear if parts > 1 else whole_linear)


def expect(
    model: transformers.PreTrainedModel,
    samples: Sequence[Sample],
    steps: int,
    lr: float,
    loss_of: Callable[[transformers.PreTrainedModel, Sample], Tensor] = reference.loss_of,
    balance: Mapping[str, float] | None = None,
) -> Expected:
    """Train copies of a float32 `model` in float64, and in float32 with sums in three orders.

    Each float32 training has another order of the samples and of the sums in linear layers. The
    order of samples alone would not do: a norm is one number, and after a single rounding in the
    layers it may be right by chance.
    """
    exact_model = copy.deepcopy(model)
    reference.to_double(exact_model)
    exact = reference.train(exact_model, list(samples), steps, lr, loss_of, balance)

    half = len(samples) // 2
    orders = [samples, samples[::-1], [*samples[half:], *samples[:half]]]
    runs = []
    for parts, order in enumerate(orders, 1):
        with _split_linear(parts):
            runs.append(
                reference.train(copy.deepcopy(model), list(order), steps, lr, loss_of, balance)
            )
    return Expected(steps=exact, float32=largest(errors(run, exact) for run in runs))


def errors(computed: Sequence[Mapping[str, Any]], exact: Sequence[Mapping[str, Any]]) -> Errors:
    """Return the largest errors of one training against another; see `reference.train`.

    `computed` may lack gradients.
    """
    return largest(_step_errors(*steps) for steps in zip(computed, exact, strict=True))


def largest(several: Iterable[Errors]) -> Errors:
    """Return the largest error of each kind."""
    rows = [asdict(row) for row in several]
    return Errors(**{name: max(row[name] for row in rows) for name in rows[0]})


def gap(computed: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the largest |p − p̂|∞ / |p̂|∞ of tensors with the same names."""
    assert set(computed) == set(exact), set(computed) ^ set(exact)
    gaps = [
        float((computed[name] - tensor).abs().max() / tensor.abs().max())
        for name, tensor in exact.items()
    ]
    return max(gaps)


def compare(out: Path, expected: Expected) -> None:
    """Assert that the output of `ranks.train` is as near to float64 as plain float32 allows."""
    history = [
        {
            "loss": metrics["agent/a/loss"] + metrics["agent/b/loss"],
            "norm": metrics["grad_norm"],
            "agent_norm": {agent: metrics[f"agent/{agent}/grad_norm"] for agent in ("a", "b")},
            "parameters": torch.load(out / f"weights_{step}.pt", weights_only=True),
        }
        for step, metrics in enumerate(json.loads((out / "history.json").read_text()))
    ]
    exceeded = errors(history, expected.steps).exceeded(expected.float32)
    assert not exceeded, f"{exceeded}; plain float32: {expected.float32}"


@torch.no_grad()
def assert_scores(
    rows: Sequence[Tensor],
    model: transformers.PreTrainedModel,
    samples: Sequence[Sample],
    score: Callable[[transformers.PreTrainedModel, Sample], Tensor] = reference.logprobs_of,
    train: Callable[[transformers.PreTrainedModel], object] = lambda model: None,
) -> None:
    """Assert the scores of trained tokens.

    Args:
        rows: [C] scores of each sample.
        model: float32 model. Copies of it are trained and then compute the expected scores.
        score: returns the [C] expected scores of a sample.
        train: trains a model in place.
    """
    exact_model = copy.deepcopy(model)
    reference.to_double(exact_model)
    float32_model = copy.deepcopy(model)
    with torch.enable_grad():
        train(exact_model)
        train(float32_model)

    computed = []
    float32 = []
    exact = []
    for row, sample in zip(rows, samples, strict=True):
        mask = torch.tensor(sample.trained or (True,) * len(sample.completion_ids))
        computed.append(row[mask])
        float32.append(score(float32_model, sample)[mask])
        exact.append(score(exact_model, sample)[mask])
    scale = max(float(row.abs().max()) for row in exact)

    def largest_error(scores: Sequence[Tensor]) -> float:
        pairs = zip(scores, exact, strict=True)
        return max(float((row - want).abs().max()) for row, want in pairs) / scale

    error = largest_error(computed)
    allowed = bound(largest_error(float32))
    assert error <= allowed, f"{error:.1e} of the largest score; plain float32 allows {allowed:.1e}"


def _step_errors(computed: Mapping[str, Any], exact: Mapping[str, Any]) -> Errors:
    norms = [gradient.norm() for gradient in exact["gradients"].values()]
    total_norm = float(torch.stack(norms).norm())
    gradient_errors = []
    if "gradients" in computed:
        assert set(computed["gradients"]) == set(exact["gradients"])
        for name, gradient in exact["gradients"].items():
            difference = float((computed["gradients"][name] - gradient).norm())
            gradient_errors.append(difference / max(float(gradient.norm()), 0.01 * total_norm))
    agent_errors = [
        _relative_number(computed["agent_norm"][agent], norm)
        for agent, norm in exact["agent_norm"].items()
    ]
    return Errors(
        loss=_relative_number(computed["loss"], exact["loss"]),
        norm=_relative_number(computed["norm"], exact["norm"]),
        agent_norms=max(agent_errors),
        gradients=max(gradient_errors, default=0.0),
        parameters=gap(computed["parameters"], exact["parameters"]),
    )


def _relative_number(computed: float, exact: float) -> float:
    if exact == 0:  # the loss of an agent that a mask leaves without tokens
        return float(computed != exact)
    return abs(computed - exact) / abs(exact)
