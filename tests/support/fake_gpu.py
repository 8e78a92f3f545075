"""The trainer's GPU code on a machine without a GPU, metered.

Prints launches, waits of the host, copies, memory and an estimated time of updates. The time is a
prediction (see `gpu_meter`) within 10 % of what an H100 took.

    python -m tests.support.fake_gpu '{"model": "4b", "layout": "groups", "recompute": "selective"}' ...

torch is patched before Megatron is imported, so this is a program, which tests run as a process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.gpu_meter import METER
from tests.support.gpu_patches import OnMeta, prepare
from tests.support.gpu_streams import CLOCK, Stream

_ADVERTISED_FLOPS = 989e12  # denominator of MFU
# When the H100 was measured, 16 threads selected the numbers of a column, which took up to 90 ms for the
# 16 columns of an update.
_COLUMN_S = 90e-3 / 16
_LAYER_REGIONS = ("attention", "projections", "mlp", "layer")


def measure(
    folder: Path,
    *,
    model: str,
    layout: str,
    layers: int | None = None,
    microbatches: int = 1,
    agents: int = 1,
    updates: int = 1,
    reference: bool = False,
    change: str = "",
    **spec: Any,
) -> dict[str, Any]:
    """Return the figures of an update of a model of `benchmarks.gpu.shapes`.

    Args:
        folder: folder to write the model's configuration to.
        layout: layout of a micro-batch.
        layers: number of layers; None for all of the model's.
        microbatches: micro-batches of every agent and data-parallel rank.
        updates: number of updates; the last one is measured.
        reference: measure the second scoring by the reference weights after the updates.
        change: one of `CHANGES`, which makes the update worse.
        spec: fields of the trainer's specification.
    """
    from benchmarks.gpu.shapes import LAYOUTS, MODELS, make_batch, write_model
    from mcore_mas.config.policy import LoraConfig
    from mcore_mas.equations.losses import ValueObjective
    from mcore_mas.megatron.batch import CostModel, Microbatch
    from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
    from mcore_mas.megatron.step.trainer import MegatronTrainer

    model_folder = write_model(model, folder / f"{model}_{layers}", layers)
    if "lora" in spec:
        spec["lora"] = LoraConfig(**spec["lora"])
    is_critic = spec.get("head") == "value"
    if is_critic:
        spec["objective"] = ValueObjective()
    trainer_spec = TrainerSpec(model=str(model_folder), init="random", **{"bf16": True, **spec})
    vocab = int(MODELS[model]["vocab_size"])
    start_s = time.process_time()
    gc.collect()
    bytes_of_earlier_trainers = METER.bytes

    with OnMeta(), METER, CHANGES[change]():
        init_process_groups(trainer_spec, rank=0, threads=1)
        trainer = MegatronTrainer(trainer_spec)

        def make_batches(layout: str, agents: int, microbatches: int) -> list[Microbatch]:
            batches = []
            for agent in range(agents):
                for seed in range(microbatches * trainer_spec.dp):
                    batch = make_batch(LAYOUTS[layout], vocab=vocab, seed=seed)
                    if is_critic:
                        batch = replace(batch, values=batch.weights, returns=batch.advantages)
                    batches.append(replace(batch, agent=f"agent {agent}"))
            return batches

        # Of an earlier update, only Adam's moments remain.
        for _ in range(updates - 1):
            trainer._step(0, norm=trainer._gradient_norm(), lr_scale=1.0)
        batches = make_batches(layout, agents, microbatches)
        calls: list[Callable[[Any], Any]] = [trainer.update]
        if reference:
            calls += [partial(trainer.score, reference=True)] * 2
        for call in calls:
            METER.clear()
            call(batches)
        persistent_bytes = METER.bytes - bytes_of_earlier_trainers
        destroy_process_groups()

    layers = layers or int(MODELS[model]["num_hidden_layers"])
    seconds = sum(METER.seconds.values())
    launches = sum(METER.launches.values())
    flops = CostModel.of(trainer_spec).flops(*batches) / trainer_spec.ranks
    CLOCK.wait()
    step_s = CLOCK.host_s
    return {
        "model": model,
        "layout": layout,
        "recompute": trainer_spec.recompute,
        "tokens": len(batches[0].token_ids),
        "trained": sum(p.numel() for p in trainer.model.trained_parameters.values()),
        "bytes": {"kept": persistent_bytes, "peak": METER.peak - bytes_of_earlier_trainers},
        "moved_gb": round(METER.moved_bytes / 1e9, 2),
        "launches": launches,
        "launches_by_region": dict(METER.launches.most_common()),
        "launches_per_layer": {
            region: METER.launches[region] / layers / microbatches for region in _LAYER_REGIONS
        },
        "milliseconds": {
            region: round(1e3 * value, 1) for region, value in METER.seconds.most_common()
        },
        "idle_ms": round(1e3 * (step_s - seconds), 1),
        "seconds_per_update": round(step_s, 4),
        "mfu": round(flops / step_s / _ADVERTISED_FLOPS, 3),
        "operations": {"counted": METER.model_operations, "model": flops},
        "waits": dict(+METER.waits),
        "copies": dict(METER.copies),
        "inline": dict(METER.inline),
        "uploads": METER.uploads,
        "crossed": dict(METER.crossed),
        "order": METER.order,
        "races": dict(METER.races),
        "mixed": dict(METER.mixed),
        "cpu_seconds": round(time.process_time() - start_s, 1),
    }


def _patched(
    target: str, name: str, change: Callable[[Any], Any]
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a function whose block replaces attribute `name` of `target` by `change(attribute)`.

    Args:
        target: "module" or "module:class".
    """

    def block() -> contextlib.AbstractContextManager[Any]:
        module, _, class_name = target.partition(":")
        owner = importlib.import_module(module)
        if class_name:
            owner = getattr(owner, class_name)
        return mock.patch.object(owner, name, change(getattr(owner, name)))

    return block


def _upload_late(_: Any) -> Any:
    """Return a replacement of `prefetch` that uploads each batch when it is asked for."""
    from mcore_mas.megatron.transfer import upload

    def upload_each(values: Any, device: Any, stream: Any) -> Iterator[Any]:
        for value in values:
            uploaded = upload(value, device, stream)
            Stream.current.wait_stream(stream)
            yield uploaded

    return upload_each


def _after(first: Callable[[], Any], function: Any) -> Any:
    """Return the function, with a call of `first` before each of its calls."""

    def inner(*arguments: Any, **keywords: Any) -> Any:
        first()
        return function(*arguments, **keywords)

    return inner


def _without_pinned_memory(empty: Any) -> Any:
    """Return a replacement of `torch.empty` that ignores `pin_memory`."""

    def inner(*arguments: Any, pin_memory: bool = False, **keywords: Any) -> Any:
        return empty(*arguments, **keywords)

    return inner


@contextlib.contextmanager
def _without_fused_layers() -> Iterator[None]:
    """Compute norms, SwiGLU and head without Triton's kernels."""
    with contextlib.ExitStack() as stack:
        for name in ("norm", "mlp", "head"):
            module = importlib.import_module(f"mcore_mas.megatron.model.{name}")
            stack.enter_context(mock.patch.object(module, "use_triton", lambda _: False))
        yield


def _with_column_cost(reduce: Any) -> Any:
    """Return the function, with the time of a column's statistics as it was on the H100."""

    def inner(*arguments: Any) -> Any:
        CLOCK.host_s += _COLUMN_S
        return reduce(*arguments)

    return inner


def _step_as_megatron(_: Any) -> Any:
    """Return a replacement of `step_optimizer` that computes the norm again."""
    return lambda optimizer, _: optimizer.step()


def _rotate_in_one_launch(x: Any, angles: Any, interleaved: bool = False) -> Any:
    """Stand in for the kernel that rotated queries or keys; on `meta` the numbers do not matter."""
    return 2.0 * x


def _with_64_keys(sizes_of: Any) -> Any:
    """Return a replacement of `TileSizes.of` with tiles of 64 keys in the gradients of keys and values."""
    return staticmethod(
        lambda *arguments, **keywords: replace(sizes_of(*arguments, **keywords), keys_kv=64)
    )


def _row_linear(_: Any) -> Any:
    """Return the linear layer that computes its product again in full recomputation."""
    from mcore_mas.megatron.model.linear import RowLinear

    return RowLinear


def _copy_one_by_one(_: Any) -> Any:
    """Return a replacement of Megatron's copy of lists that launches a kernel for each tensor."""

    def copy(this: Any, that: Any, overflow_buf: Any = None) -> None:
        for source, target in zip(this, that, strict=True):
            target.copy_(source)

    return copy


@contextlib.contextmanager
def _as_measured() -> Iterator[None]:
    """Run the code of 2026-11-28, when the H100 was measured.

    Its norms, rotation, tiles, statistics and optimizer step were others.
    """
    parts = (
        _patched("mcore_mas.megatron.model.norm", "use_triton", lambda _: lambda _: False),
        _patched("mcore_mas.megatron.step.statistics", "_reduce_column", _with_column_cost),
        _patched("mcore_mas.megatron.model.layout:TileSizes", "of", _with_64_keys),
        CHANGES["queries and keys not fused"],
        _patched(
            "megatron.core.models.common.embeddings.rope_utils",
            "fused_apply_rotary_pos_emb",
            lambda _: _rotate_in_one_launch,
        ),
        CHANGES["norm of the gradient computed twice"],
        CHANGES["weights copied one by one"],
        CHANGES["logits computed twice"],
        CHANGES["residuals not fused"],
        CHANGES["last products computed again"],
    )
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(part())
        yield


_PIPELINE = "mcore_mas.megatron.step.pipeline"
# Changes that would make an update slow or wrong on a GPU, and that no test on a CPU shows.
CHANGES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "": contextlib.nullcontext,
    "queries and keys not fused": _patched(
        "mcore_mas.megatron.model.build", "_use_fused_attention", lambda _: lambda _: None
    ),
    "SwiGLU and head not fused": _without_fused_layers,
    "as measured": _as_measured,
    "logits computed twice": _patched(
        f"{_PIPELINE}:Pipeline", "_row_gradients", lambda _: lambda *_: None
    ),
    "residuals not fused": _patched(
        "mcore_mas.megatron.model.build", "_fuse_residuals", lambda _: lambda _: None
    ),
    "last products computed again": _patched(
        "mcore_mas.megatron.model.build", "LastLinear", _row_linear
    ),
    "norm of the gradient computed twice": _patched(
        "mcore_mas.megatron.step.trainer", "step_optimizer", _step_as_megatron
    ),
    "weights copied one by one": _patched(
        "megatron.core.optimizer.optimizer", "_multi_tensor_copy_this_to_that", _copy_one_by_one
    ),
    "pageable": _patched("torch", "empty", _without_pinned_memory),
    "waiting in each step": _patched(
        f"{_PIPELINE}:Pipeline", "_forward_step", partial(_after, lambda: torch.cuda.synchronize())
    ),
    "a stream's wait in each step": _patched(
        f"{_PIPELINE}:Pipeline",
        "_forward_step",
        partial(_after, lambda: torch.cuda.current_stream().synchronize()),
    ),
    "not ahead": _patched(_PIPELINE, "prefetch", _upload_late),
    "read too early": _patched(
        "tests.support.gpu_streams:Stream", "wait_event", lambda _: lambda *_: None
    ),
    "freed too early": _patched(
        "tests.support.gpu_meter:Meter", "record_stream", lambda _: lambda *_: None
    ),
}


def main(cases: list[str]) -> None:
    """Measure each case, a JSON object of arguments of `measure`, and print its figures as JSON."""
    prepare()
    importlib.import_module("mcore_mas.megatron.step.trainer")
    gc.freeze()  # excludes the modules from collections, each of which would take half a second
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            print(json.dumps(measure(Path(folder), **json.loads(case))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
