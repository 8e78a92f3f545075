"""Trainer of one policy or critic: updates, scores, weights and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from mcore_mas.equations.balance import part_factor, sum_factor
from mcore_mas.equations.effective_samples import REPLY_SUMS, effective_sample_metrics
from mcore_mas.megatron.batch import Microbatch
from mcore_mas.megatron.collectives import all_gather_json
from mcore_mas.megatron.device import rank_device
from mcore_mas.megatron.host_memory import BlockMemory
from mcore_mas.megatron.model.decoder import PackedGPTModel
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.state.host_moments import keep_moments_on_host
from mcore_mas.megatron.state.offload import Offload
from mcore_mas.megatron.state.optimizer import (
    OptimizerState,
    gathers_late,
    make_optimizer,
    step_optimizer,
)
from mcore_mas.megatron.state.sharded import ShardedCheckpoint
from mcore_mas.megatron.state.sharded_model import ShardedModel
from mcore_mas.megatron.step.pipeline import Pipeline, reports_outputs
from mcore_mas.megatron.step.schedule import LearningRateSchedule
from mcore_mas.megatron.step.spikes import SpikeMonitor
from mcore_mas.megatron.step.statistics import summarise
from rollout.base.digests import Digest

# Name of the spike monitor of the whole gradient, among those of the agents.
_WHOLE_GRADIENT = ""


class MegatronTrainer:
    """Trainer of one policy or critic.

    Every rank of the policy's process group holds a trainer and makes the same calls.

    Attributes:
        spec: specification of the trainer.
        updates: number of optimizer steps taken.
    """

    def __init__(self, spec: TrainerSpec, base: MegatronTrainer | None = None) -> None:
        """Load `spec.model` into this rank's shard. The process group must exist.

        Args:
            spec: specification of the trainer.
            base: trainer of adapters on the same model. Its frozen weights are shared, so that they
                are in memory once; see `ShardedModel`.

        Raises:
            ModelError: the model is not supported, or its tensors cannot be split over the ranks as
                `spec` says.
        """
        self.spec = spec
        self.updates = 0
        self._model: ShardedModel = ShardedModel(spec, base._model if base else None)
        self._parameters = self._model.trained_parameters
        self._stages = [
            _wrap_stage(stage, spec, is_first=number == 0)
            for number, stage in enumerate(self._model.stages)
        ]
        self._optimizer = make_optimizer(self._stages, spec)
        host_moments = keep_moments_on_host(self._optimizer) if spec.host_moments else None
        self._configure_pipeline_schedule()

        self._lr_schedule = LearningRateSchedule(self._optimizer, spec)
        self._spikes: dict[str, SpikeMonitor] = {}
        self._state = OptimizerState(self._optimizer, self._parameters, host_moments)
        self._checkpoint = ShardedCheckpoint(
            self._state, self._parameters, self._model.architecture
        )
        self._pipeline = Pipeline(self._stages, spec, self._model.architecture)

        # Holds offloaded tensors, and during an update the sum of the agents' gradients.
        self._host_memory = BlockMemory()
        self._offload = Offload(
            self._gradient_buffers(), self._offloaded_tensors, self._host_memory
        )
        self._is_offloaded = False
        # With lazy gathering, the parts that other ranks have stepped are old until the next
        # forward pass.
        self._gathers_late = gathers_late(spec)
        self._has_old_parts = False

    def _configure_pipeline_schedule(self) -> None:
        """Tell Megatron's pipeline schedule how to scale the loss and reduce the gradients."""
        for stage in self._model.stages:
            stage.config.finalize_model_grads_func = _finalize_gradients
            stage.config.grad_scale_func = self._optimizer.scale_loss
            if self.spec.overlap:
                # Ranks exchange gradients in the backward pass of the last micro-batch only.
                no_sync = [wrapped.no_sync for wrapped in self._stages]
                stage.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def _gradient_buffers(self) -> Iterator[Tensor]:
        for stage in self._stages:
            for buffer in (*stage.buffers, *stage.expert_parallel_buffers):
                yield buffer.grad_data

    def _offloaded_tensors(self) -> Iterator[Tensor]:
        """Yield weights and optimizer state that are on a GPU; on the CPU they stay in place."""
        for tensor in (*self._model.all_parameters.values(), *self._state.tensors()):
            if tensor.is_cuda:
                yield tensor

    @property
    def model(self) -> ShardedModel:
        """This rank's shard of the weights after the last step."""
        self._gather_weights()
        return self._model

    def keep_version(self, version: int, count: int) -> None:
        """Copy the present weights to host memory; see `ShardedModel.keep_version`."""
        self.model.keep_version(version, count)

    def score(
        self,
        microbatches: Sequence[Microbatch],
        *,
        reference: bool = False,
        version: int | None = None,
    ) -> list[Tensor]:
        """Compute the log-probabilities of all labels at their temperatures, or a critic's values.

        Args:
            microbatches: those of all data-parallel ranks.
            reference: True to compute them with the frozen weights of `spec.model`. These are read
                on first use and kept as one copy of the shard in host memory; a policy with
                adapters leaves its adapters out and needs no copy.
            version: compute them with the weights of this version, which `keep_version` has copied;
                None: with the present weights.

        Returns:
            Scores [N] float32 of each micro-batch, on the CPU and the same on every rank.
        """
        self._check_not_offloaded()
        if version is not None:
            with self.model.at_version(version):
                return self._pipeline.score(microbatches)
        if not reference:
            return self._pipeline.score(microbatches)

        # The present weights are put back afterwards, so they must be gathered before. The recorded
        # routing is left out, because the engine did not sample with the reference.
        self._gather_weights()
        microbatches = [replace(batch, routing=None) for batch in microbatches]
        with self._model.reference():
            return self._pipeline.score(microbatches)

    def update(self, microbatches: Sequence[Microbatch], at: int | None = None) -> dict[str, float]:
        """Take one optimizer step on all micro-batches.

        The gradient of each agent is computed by itself, so that its norm is known even if agents
        share the policy. With `spec.balance`, the gradients of several agents are rescaled before
        they are summed, and an agent's metrics describe its gradient before that. If the norm of
        the whole gradient is not finite, or with `spec.skip_spikes` is a spike, the parameters and
        the optimizer stay as they are, on all ranks.

        Args:
            microbatches: those of all data-parallel ranks, at least one.
            at: position in the learning-rate schedule; None: the number of updates so far.

        Returns:
            Metrics by name, the same on every rank: those of the step, and those of each agent as
            `agent/AGENT/NAME`.
        """
        self._check_not_offloaded()
        batches_by_agent: dict[str, list[Microbatch]] = {}
        for batch in sorted(microbatches, key=lambda batch: batch.agent):
            batches_by_agent.setdefault(batch.agent, []).append(batch)
        has_several_agents = len(batches_by_agent) > 1

        # If a rank steps only its part of the gradient, the sum fits on the device. Otherwise it
        # would be a second whole gradient there, and is kept in host memory.
        steps_a_part = self.spec.distributed_optimizer and self.spec.dp * self.spec.cp > 1
        sum_memory = BlockMemory(rank_device()) if steps_a_part else self._host_memory

        metrics: dict[str, float] = {}
        norms: dict[str, float] = {}
        reply_sums = dict.fromkeys(REPLY_SUMS, 0.0)
        for number, (agent, agent_batches) in enumerate(batches_by_agent.items(), 1):
            agent_metrics = self._compute_gradients(agent_batches)
            norms[agent] = agent_metrics["grad_norm"]
            for name in REPLY_SUMS:
                reply_sums[name] += agent_metrics.pop(name, 0.0)
            agent_metrics["grad_spikes"] = float(self._observe_norm(agent, norms[agent]))
            metrics |= {f"agent/{agent}/{name}": value for name, value in agent_metrics.items()}

            if has_several_agents:
                if self.spec.balance is not None:
                    self._scale_gradients(part_factor(norms[agent], self.spec.balance[agent]))
                self._accumulate_agents(
                    sum_memory, is_first=number == 1, is_last=number == len(batches_by_agent)
                )

        if has_several_agents:
            if self.spec.balance is not None:
                self._scale_gradients(sum_factor(norms, self.spec.balance))
            whole_norm = self._gradient_norm()
        else:
            (whole_norm,) = norms.values()

        metrics |= effective_sample_metrics(reply_sums)
        lr_scale = 1.0
        if self.spec.scales_lr:
            lr_scale = math.sqrt(metrics.get("effective_sample_share", 1.0))
        return metrics | self._step(self.updates if at is None else at, whole_norm, lr_scale)

    def _compute_gradients(self, microbatches: list[Microbatch]) -> dict[str, float]:
        """Set `main_grad` to the gradients of one agent's micro-batches; return its metrics."""
        for stage in self._stages:
            stage.zero_grad_buffer()
        self._optimizer.zero_grad()
        statistics = self._pipeline.backward(microbatches)
        metrics = {"grad_norm": self._gradient_norm()}
        # One rank of each model replica reports its statistics; the other ranks send nothing.
        return metrics | summarise(
            statistics, lambda partial: all_gather_json(partial if reports_outputs() else {})
        )

    def _scale_gradients(self, factor: float) -> None:
        """Multiply this rank's gradients by a factor, which is the same on every rank."""
        for gradient in self._state.gradients():
            gradient *= factor

    def _accumulate_agents(self, sums: BlockMemory, *, is_first: bool, is_last: bool) -> None:
        """Add the sum of the earlier agents' gradients to the gradients of the current agent.

        Args:
            sums: holds the sum between the agents.
            is_first: there is no sum yet.
            is_last: the sum is not needed any more.
        """
        for gradient_bytes, slot in sums.slots(self._state.gradients()):
            gradient = gradient_bytes.view(torch.float32)
            earlier_sum = slot.view(torch.float32)
            if not is_first:
                gradient += earlier_sum.to(gradient.device, non_blocking=True)
            if not is_last:
                earlier_sum.copy_(gradient, non_blocking=True)

    def _gradient_norm(self) -> float:
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def _observe_norm(self, gradient_name: str, norm: float) -> bool:
        """Record the norm of an agent's or of the whole gradient; return True if it is a spike."""
        if gradient_name not in self._spikes:
            self._spikes[gradient_name] = SpikeMonitor(self.spec.spike_factor)
        return self._spikes[gradient_name].observe(norm)

    def _step(self, at: int, norm: float, lr_scale: float) -> dict[str, float]:
        """Step the optimizer, unless the gradient is to be skipped; return the metrics of the step."""
        lr = self._lr_schedule.set(at, lr_scale)
        is_spike = self._observe_norm(_WHOLE_GRADIENT, norm)
        is_skipped = not math.isfinite(norm) or (is_spike and self.spec.skip_spikes)
        if not is_skipped:
            step_optimizer(self._optimizer, norm)
            self._has_old_parts = self._gathers_late
            self.updates += 1
        return {
            "grad_norm": norm,
            "lr": lr,
            "grad_spikes": float(is_spike),
            "skipped_updates": float(is_skipped),
        }

    def sleep(self) -> int:
        """Free the gradients and, on a GPU, offload weights and optimizer state to the host.

        Until `wake`, no other method may be called. Then all tensors have the same bits again.

        Returns:
            Bytes that became free.
        """
        self._gather_weights()
        self._is_offloaded = True
        return self._offload.sleep()

    def wake(self) -> None:
        """Restore the tensors that `sleep` offloaded; do nothing if the trainer is not asleep."""
        if self._is_offloaded:
            self._offload.wake()
            self._is_offloaded = False

    def _check_not_offloaded(self) -> None:
        if self._is_offloaded:
            raise RuntimeError(
                "the trainer is offloaded and has no memory to work in; call wake() first"
            )

    def _gather_weights(self) -> None:
        """Gather the weights after the last step, if they are gathered only when needed."""
        self._check_not_offloaded()
        if self._has_old_parts:
            for stage in self._stages:
                stage.start_param_sync(force_sync=True)
            self._has_old_parts = False

    def save(self, folder: Path) -> None:
        """Copy this rank's weights and optimizer state, for a thread to write to `folder`.

        The files are in terms of Hugging Face's tensors: `restore` reads them in any layout.
        """
        self._check_not_offloaded()
        spikes = {name: {"norms": list(monitor.norms)} for name, monitor in self._spikes.items()}
        self._checkpoint.save(folder, {"updates": self.updates, "spikes": spikes})

    def wait_written(self) -> dict[str, Digest]:
        """Wait until the files of the last `save` are on disk; see `ShardedCheckpoint.wait_written`."""
        return self._checkpoint.wait_written()

    def restore(self, folder: Path) -> None:
        """Continue from the files that `save` wrote in any layout.

        Raises:
            ModelError: they are of another model, or incomplete.
        """
        self._gather_weights()
        self._model.drop_versions()
        record = self._checkpoint.restore(folder)
        self.updates = record["updates"]
        self._spikes = {
            name: SpikeMonitor(self.spec.spike_factor, norms=state["norms"])
            for name, state in record["spikes"].items()
        }


def _wrap_stage(
    stage: PackedGPTModel, spec: TrainerSpec, *, is_first: bool
) -> DistributedDataParallel:
    """Wrap a pipeline stage so that data-parallel ranks sum its gradients in float32 buffers."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=spec.distributed_optimizer,
        overlap_grad_reduce=spec.overlap,
        overlap_param_gather=gathers_late(spec),
        bucket_size=spec.bucket,
    )
    module = Float16Module(stage.config, stage) if spec.bf16 else stage
    return DistributedDataParallel(stage.config, config, module, disable_bucketing=not is_first)


def _finalize_gradients(model: list[torch.nn.Module], _num_tokens: Tensor, **groups: Any) -> None:
    """Sum the gradients over ranks, undivided: the token weights are normalised already."""
    finalize_model_grads(model, None, **groups)
