"""Trainer of one policy or critic: an update on micro-batches, its learning rate, scores, and its weights."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from mcore_mas.megatron.batch import Microbatch
from mcore_mas.megatron.collectives import all_gather_json
from mcore_mas.megatron.device import rank_device
from mcore_mas.megatron.host_memory import BlockMemory
from mcore_mas.megatron.model.decoder import PackedGPTModel
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.state.optimizer import Offload, OptimizerState, gathers_late, make_optimizer
from mcore_mas.megatron.state.sharded import ShardedCheckpoint
from mcore_mas.megatron.state.sharded_model import ShardedModel
from mcore_mas.megatron.step.pipeline import Pipeline, speaks, summarise

_POLICY = ""  # the spike monitor of the whole gradient, beside those of the agents


class MegatronTrainer:
    """Trains one policy; every rank of the policy's process group holds one and makes the same calls."""

    def __init__(self, spec: TrainerSpec, base: MegatronTrainer | None = None) -> None:
        """Load `spec.model` into this rank's shard. The process group must exist (`init_process_groups`).

        Args:
            base: trains adapters on the same model, whose frozen weights both then hold once (see `ShardedModel`).

        Raises:
            ModelError: the folder is no supported model, or cannot be cut as `spec` says.
        """
        self.spec = spec
        self._model: ShardedModel = ShardedModel(spec, base._model if base else None)
        self._parameters = self._model.parameters
        self._stages = [
            _wrap(stage, spec, first=i == 0) for i, stage in enumerate(self._model.stages)
        ]
        self._optimizer = make_optimizer(self._stages, spec)
        for stage in self._model.stages:
            stage.config.finalize_model_grads_func = _finalize
            stage.config.grad_scale_func = self._optimizer.scale_loss
            if (
                spec.overlap
            ):  # gradients are exchanged in the backward pass of the last micro-batch only
                without = [wrapped.no_sync for wrapped in self._stages]
                stage.config.no_sync_func = without if len(without) > 1 else without[0]
        self._schedule = LearningRateSchedule(self._optimizer, spec)
        self._state = OptimizerState(self._optimizer, self._parameters)
        self._checkpoint = ShardedCheckpoint(
            self._state, self._parameters, self._model.architecture
        )
        self.written = (
            self._checkpoint.written
        )  # waits until what `save` copied is on disk; digests by file
        self._pipeline = Pipeline(self._stages, spec, self._model.architecture)
        self._host = BlockMemory()  # of what is offloaded, and in an update of agents' gradients
        self._offload = Offload(
            (
                buffer.grad_data
                for stage in self._stages
                for buffer in (*stage.buffers, *stage.expert_parallel_buffers)
            ),
            # on the CPU what is kept stays where it is
            lambda: (
                t for t in (*self._model.tensors.values(), *self._state.tensors()) if t.is_cuda
            ),
            self._host,
        )
        self._asleep = False
        self._gathers_late = gathers_late(spec)
        self._stale = (
            False  # whether other ranks' parts of the weights are those before the last step
        )
        self._spikes: dict[str, SpikeMonitor] = {}
        self.updates = 0  # optimizer steps taken

    @property
    def model(self) -> ShardedModel:
        """This rank's shard of the weights after the last step, to be exported or written."""
        self._settle()
        return self._model

    def score(self, microbatches: Sequence[Microbatch], *, reference: bool = False) -> list[Tensor]:
        """Per micro-batch the log-probabilities [N] of its labels, after temperature; of a critic its values [N].

        float32 on the CPU, the same on every rank; nothing is trained. With `reference`, by the frozen weights of
        `spec.model`, read from there on first use and kept as one copy of the shard; a
        policy with adapters leaves them out, and keeps no copy.
        """
        if (
            reference
        ):  # what is put back afterwards must be whole; and it sampled nothing that it could repeat
            self._settle()
            microbatches = [replace(batch, routing=None) for batch in microbatches]
        self._check_awake()
        with self._model.reference() if reference else nullcontext():
            return self._pipeline.score(microbatches)

    def update(self, microbatches: Sequence[Microbatch], at: int | None = None) -> dict[str, float]:
        """One optimizer step on all of `microbatches`; returns metrics, the same on every rank.

        The learning rate is that of place `at` in its schedule; None: of the number of updates so far.

        Gradients are finished agent by agent, so each agent's own gradient norm is known even when agents share the
        policy. A step whose gradient is not finite, or with `spec.skip_spikes` a spike, leaves every parameter and
        the optimizer untouched, on all ranks alike.
        """
        self._check_awake()
        agents = {
            agent: list(own)
            for agent, own in itertools.groupby(
                sorted(microbatches, key=lambda m: m.agent), key=lambda m: m.agent
            )
        }
        metrics: dict[str, float] = {}
        shared = self.spec.distributed_optimizer and self.spec.dp * self.spec.cp > 1
        sums = BlockMemory(rank_device()) if shared else self._host
        for number, (agent, own) in enumerate(agents.items(), 1):
            metrics |= {
                f"agent/{agent}/{name}": value for name, value in self._accumulate(own).items()
            }
            metrics[f"agent/{agent}/grad_spikes"] = float(
                self._spike(agent, metrics[f"agent/{agent}/grad_norm"])
            )
            self._add_up(sums, first=number == 1, last=number == len(agents))
        # an only agent's gradient is the whole one
        norm = self._norm() if len(agents) > 1 else metrics[f"agent/{next(iter(agents))}/grad_norm"]
        return metrics | self._step(self.updates if at is None else at, norm)

    def _accumulate(self, microbatches: list[Microbatch]) -> dict[str, float]:
        """Gradients of one agent's micro-batches into `main_grad`, with its metrics."""
        for stage in self._stages:
            stage.zero_grad_buffer()
        self._optimizer.zero_grad()
        rows = self._pipeline.backward(microbatches)
        # one part for each data-parallel rank, and nothing from the others
        return {"grad_norm": self._norm()} | summarise(
            rows, lambda part: all_gather_json(part if speaks() else {})
        )

    def _add_up(self, sums: BlockMemory, *, first: bool, last: bool) -> None:
        """Add the gradient of the agents before to this one's, of what this rank steps; `sums` has it in between.

        That is the host's memory where a rank steps all, which would be a second gradient on the device.
        """
        for part, place in () if first and last else sums.slots(self._state.gradients()):
            gradient, before = part.view(torch.float32), place.view(torch.float32)
            if not first:
                gradient += before.to(gradient.device, non_blocking=True)
            if not last:
                before.copy_(gradient, non_blocking=True)

    def _norm(self) -> float:
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def _spike(self, of: str, norm: float) -> bool:
        return self._spikes.setdefault(of, SpikeMonitor(self.spec.spike_factor)).observe(norm)

    def _step(self, at: int, norm: float) -> dict[str, float]:
        lr = self._schedule.set(at)
        spike = self._spike(_POLICY, norm)
        skipped = not math.isfinite(norm) or (spike and self.spec.skip_spikes)
        if not skipped:
            self._optimizer.step()
            self._stale = self._gathers_late
            self.updates += 1
        return {
            "grad_norm": norm,
            "lr": lr,
            "grad_spikes": float(spike),
            "skipped_updates": float(skipped),
        }

    def sleep(self) -> int:
        """Give away the memory of gradients and, on a GPU, of weights and optimizer state; returns how many bytes.

        Until `wake`, nothing but that can be asked of the trainer. What was kept comes back bit for bit.
        """
        self._settle()
        self._asleep = True
        return self._offload.sleep()

    def wake(self) -> None:
        """Take back what `sleep` gave away."""
        if self._asleep:
            self._offload.wake()
            self._asleep = False

    def _check_awake(self) -> None:
        if self._asleep:
            raise RuntimeError(
                "the trainer is asleep and holds no memory to work in; call wake() first"
            )

    def _settle(self) -> None:
        """Every rank's weights are those after the last step, also where they are gathered no sooner than needed."""
        self._check_awake()
        if self._stale:
            for stage in self._stages:
                stage.start_param_sync(force_sync=True)
            self._stale = False

    def save(self, folder: Path) -> None:
        """Copy this rank's share of weights and optimizer state, which a thread then writes into `folder`.

        The files name Hugging Face tensors and hold no layout: `restore` reads them in any other.
        """
        self._check_awake()
        spikes = {of: {"norms": list(monitor.norms)} for of, monitor in self._spikes.items()}
        self._checkpoint.save(folder, {"updates": self.updates, "spikes": spikes})

    def restore(self, folder: Path) -> None:
        """Continue from what `save` wrote, in whatever layout it was written.

        Raises:
            ModelError: it is of another model, or not all there.
        """
        self._settle()
        saved = self._checkpoint.restore(folder)
        self.updates = saved["updates"]
        factor = self.spec.spike_factor
        self._spikes = {
            of: SpikeMonitor(factor, norms=state["norms"]) for of, state in saved["spikes"].items()
        }


def _wrap(stage: PackedGPTModel, spec: TrainerSpec, *, first: bool) -> DistributedDataParallel:
    """One stage of this rank, with its gradients in float32 buffers that data-parallel ranks sum."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=spec.distributed_optimizer,
        overlap_grad_reduce=spec.overlap,
        overlap_param_gather=gathers_late(spec),
        bucket_size=spec.bucket,
    )
    module = Float16Module(stage.config, stage) if spec.bf16 else stage
    return DistributedDataParallel(stage.config, config, module, disable_bucketing=not first)


def _finalize(model: list[torch.nn.Module], _num_tokens: Tensor, **groups: Any) -> None:
    # the denominator is already in the token weights: reduce over ranks, do not divide
    finalize_model_grads(model, None, **groups)


class LearningRateSchedule:
    """Sets an optimizer's rates from the number of updates alone: a run that resumes has nothing to restore."""

    def __init__(self, optimizer: Any, spec: TrainerSpec) -> None:
        """Drive `optimizer`, as `get_megatron_optimizer` gives it or anything with its `param_groups`."""
        self._warmup = spec.warmup_steps
        self._megatron = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=spec.lr,
            min_lr=spec.min_lr,
            lr_warmup_steps=spec.warmup_steps,
            # Megatron asserts so much, though a constant rate reads nothing of it
            lr_decay_steps=max(spec.decay_steps or 0, spec.warmup_steps + 1),
            lr_decay_style=spec.schedule,
            start_wd=spec.weight_decay,
            end_wd=spec.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def set(self, updates: int) -> float:
        """Set and return the learning rate of the update that follows `updates` others.

        Warm-up rises by lr / warmup_steps, so that no update has a rate of 0, and its last has lr; so has the first
        after it, from which `schedule` falls to min_lr at decay_steps. Weight decay is 0 for what has one dimension.
        """
        self._megatron.num_steps = updates + 1 if updates < self._warmup else updates
        self._megatron.step(0)
        lr: float = self._megatron.get_lr({})
        return lr


class SpikeMonitor:
    """Finds a gradient spike: judges gradient norms one by one against the running median of those before.

    A spike is a norm that is not finite, or more than `factor` times the median of the last `window` finite norms.
    Spikes enter the window too: if norms stay high, the median follows and the verdict ends.
    """

    def __init__(
        self, factor: float = 10.0, window: int = 100, warmup: int = 5, norms: Iterable[float] = ()
    ) -> None:
        """No finite norm is a spike before `warmup` have been seen, `norms` among them."""
        self.factor, self.warmup = factor, warmup
        self.norms = deque(norms, maxlen=window)  # oldest first

    def observe(self, norm: float) -> bool:
        """Whether `norm` is a spike; a finite one is remembered."""
        if not math.isfinite(norm):
            return True
        spike = len(self.norms) >= max(1, self.warmup) and norm > self.factor * statistics.median(
            self.norms
        )
        self.norms.append(norm)
        return spike
