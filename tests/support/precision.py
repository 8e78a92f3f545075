"""Bounds on rounding: a factor times plain float32's own error, measured against float64 in the same run.

A fixed tolerance is that of the machine it was found on: kernels sum in another order on another CPU.
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

FACTOR = 4  # times plain float32's own error
EPS = 2.0**-23  # the least that float32's own relative error is taken for: one rounding


def bound(own: float) -> float:
    """The largest relative error allowed, where plain float32's is `own`."""
    return FACTOR * max(own, EPS)


def relative(got: Tensor, exact: Tensor) -> float:
    """|x − x̂|₂ / |x̂|₂, in float64."""
    return float((got.double() - exact).norm() / exact.norm())


def assert_close(got: Tensor, own: Tensor, exact: Tensor) -> None:
    """Assert that `got` is about as near to `exact` (float64) as `own`, the same in plain float32."""
    error, allowed = relative(got, exact), bound(relative(own, exact))
    assert error <= allowed, f"{error:.1e} from float64; plain float32 allows {allowed:.1e}"


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The largest relative errors of a training over all its steps."""

    loss: float
    norm: float
    agent_norms: float
    gradients: float  # of one tensor: |g − ĝ|₂ / max(|ĝ|₂, 1% of the norm of all): a key bias's true one is 0
    parameters: float  # of one tensor: |p − p̂|∞ / |p̂|∞

    def beyond(self, own: "Errors") -> dict[str, str]:
        """What is further off than plain float32, itself off by `own`, allows: the error and the bound by name."""
        pairs = ((name, error, bound(asdict(own)[name])) for name, error in asdict(self).items())
        return {
            name: f"{error:.1e} > {allowed:.1e}"
            for name, error, allowed in pairs
            if not error <= allowed
        }


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A training in plain torch."""

    steps: list[dict[str, Any]]  # as `reference.train` gives them, in float64
    own: Errors  # plain float32's


def _in_parts(parts: int) -> AbstractContextManager[object]:
    """Linear layers add up the products of so many parts of their inputs, as tensor parallelism does."""
    plain = torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        products = [
            plain(*pair) for pair in zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
        ]
        return (
            sum(products[1:], products[0])
            if bias is None
            else sum(products[1:], products[0]) + bias
        )

    return mock.patch.object(torch.nn.functional, "linear", linear if parts > 1 else plain)


def expect(
    model: transformers.PreTrainedModel,
    samples: Sequence[Sample],
    steps: int,
    lr: float,
    loss_of: Callable[[transformers.PreTrainedModel, Sample], Tensor] = reference.loss_of,
) -> Expected:
    """Train copies of a float32 `model` in float64, and in float32 with sums in three orders.

    Both the samples change places and the linear layers sum in another order. A norm is one number: from one rounding
    of the layers it may be right by luck, whatever the order of the samples.
    """
    exact = copy.deepcopy(model)
    reference.to_double(exact)
    want = reference.train(exact, list(samples), steps, lr, loss_of)
    half = len(samples) // 2
    runs = []
    for parts, order in enumerate((samples, samples[::-1], [*samples[half:], *samples[:half]]), 1):
        with _in_parts(parts):
            runs.append(reference.train(copy.deepcopy(model), list(order), steps, lr, loss_of))
    return Expected(steps=want, own=largest(errors(run, want) for run in runs))


def errors(got: Sequence[Mapping[str, Any]], want: Sequence[Mapping[str, Any]]) -> Errors:
    """How far one training is from another, both as from `reference.train`; gradients may be left out of `got`."""
    return largest(_step(*pair) for pair in zip(got, want, strict=True))


def largest(found: Iterable[Errors]) -> Errors:
    """The largest error of each kind."""
    rows = [asdict(each) for each in found]
    return Errors(**{name: max(row[name] for row in rows) for name in rows[0]})


def gap(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """The largest |p − p̂|∞ / |p̂|∞ of tensors of the same names."""
    assert set(got) == set(want), set(got) ^ set(want)
    return max(
        float((got[name] - tensor).abs().max() / tensor.abs().max())
        for name, tensor in want.items()
    )


def compare(out: Path, expected: Expected) -> None:
    """Assert that what `ranks.train` wrote to `out` is as near to float64 as plain float32 allows."""
    history = [
        {
            "loss": metrics["agent/a/loss"] + metrics["agent/b/loss"],
            "norm": metrics["grad_norm"],
            "agent_norm": {agent: metrics[f"agent/{agent}/grad_norm"] for agent in ("a", "b")},
            "parameters": torch.load(out / f"weights_{step}.pt", weights_only=True),
        }
        for step, metrics in enumerate(json.loads((out / "history.json").read_text()))
    ]
    found = errors(history, expected.steps)
    assert not found.beyond(expected.own), (
        f"{found.beyond(expected.own)}; plain float32: {expected.own}"
    )


@torch.no_grad()
def assert_scores(
    rows: Sequence[Tensor],
    model: transformers.PreTrainedModel,
    samples: Sequence[Sample],
    score: Callable[[transformers.PreTrainedModel, Sample], Tensor] = reference.logprobs_of,
    train: Callable[[transformers.PreTrainedModel], object] = lambda model: None,
) -> None:
    """Assert the [C] scores of trained tokens, sample by sample, of a float32 `model` after `train`."""
    exact, plain = copy.deepcopy(model), copy.deepcopy(model)
    reference.to_double(exact)
    with torch.enable_grad():
        train(exact)
        train(plain)

    def trained(sample: Sample) -> Tensor:
        return torch.tensor(sample.trained or (True,) * len(sample.completion_ids))

    masks = [trained(sample) for sample in samples]
    wants = [score(exact, sample)[mask] for sample, mask in zip(samples, masks, strict=True)]
    own = [score(plain, sample)[mask] for sample, mask in zip(samples, masks, strict=True)]
    got = [row[mask] for row, mask in zip(rows, masks, strict=True)]
    scale = max(float(want.abs().max()) for want in wants)

    def worst(found: Sequence[Tensor]) -> float:
        return (
            max(float((row - want).abs().max()) for row, want in zip(found, wants, strict=True))
            / scale
        )

    error, allowed = worst(got), bound(worst(own))
    assert error <= allowed, f"{error:.1e} of the largest score; plain float32 allows {allowed:.1e}"


def _step(got: Mapping[str, Any], want: Mapping[str, Any]) -> Errors:
    gradients = want["gradients"] if "gradients" in got else {}
    assert set(got.get("gradients", {})) == set(gradients)
    whole = float(torch.stack([gradient.norm() for gradient in want["gradients"].values()]).norm())
    return Errors(
        loss=_relative(got["loss"], want["loss"]),
        norm=_relative(got["norm"], want["norm"]),
        agent_norms=max(
            _relative(got["agent_norm"][agent], norm) for agent, norm in want["agent_norm"].items()
        ),
        gradients=max(
            (
                float((got["gradients"][name] - gradient).norm())
                / max(float(gradient.norm()), 0.01 * whole)
                for name, gradient in gradients.items()
            ),
            default=0.0,
        ),
        parameters=gap(got["parameters"], want["parameters"]),
    )


def _relative(got: float, want: float) -> float:
    return (
        abs(got - want) / abs(want) if want else float(got != want)
    )  # a mask may leave an agent nothing
