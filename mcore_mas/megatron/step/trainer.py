"""One policy's or critic's trainer: an update on micro-batches, scores, and its weights as a stream."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from mcore_mas.equations.statistics import SpikeMonitor
from mcore_mas.megatron import parallel
from mcore_mas.megatron.batch import Microbatch
from mcore_mas.megatron.model.build import build_model
from mcore_mas.megatron.model.decoder import PackedGPTModel
from mcore_mas.megatron.spec import TrainerSpec, check_adapters, check_layers, check_layout
from mcore_mas.megatron.state.lora import (
    Adapter,
    AdapterFolder,
    MergedWeights,
    UnadaptedReference,
    adapters,
    attach_adapters,
    initial_adapter,
    write_adapter,
)
from mcore_mas.megatron.state.names import VALUE_HEAD, LazyTensor, is_adapter, weight_mappings
from mcore_mas.megatron.state.optimizer import LearningRateSchedule, OptimizerState
from mcore_mas.megatron.state.reference import Offload, ReferenceModel
from mcore_mas.megatron.state.sharded import ShardedCheckpoint
from mcore_mas.megatron.state.weight_export import ExportPlan, export_weights, plan_export
from mcore_mas.megatron.state.weight_import import RandomTensors, SafeTensors, full_shapes, import_weights, write_folder
from mcore_mas.megatron.step.pipeline import Pipeline, summarise
from rollout.base.errors import ModelError
from rollout.base.files import Digest
from rollout.models.architecture import read_architecture
from rollout.models.tensors import whole

_POLICY = ""  # the spike monitor of the whole gradient, beside those of the agents


class MegatronTrainer:
    """Trains one policy; every rank of the policy's process group holds one and makes the same calls."""

    def __init__(self, spec: TrainerSpec) -> None:
        """Load `spec.model` into this rank's shard. The process group must exist (`parallel.init_process_groups`).

        Raises:
            ModelError: the folder is no supported model, or cannot be cut as `spec` says.
        """
        self.spec = spec
        self.architecture = read_architecture(Path(spec.model))
        check_layout(self.architecture, spec.tp, spec.pp, spec.vpp, dp=spec.dp, ep=spec.ep, sp=spec.sp, cp=spec.cp)
        check_layers(spec.layers)
        if spec.lora is not None:
            check_adapters(self.architecture, spec.lora.targets)
        stages = [
            build_model(self.architecture, spec, vp_stage if spec.vpp > 1 else None).to(parallel.device())
            for vp_stage in range(spec.vpp)
        ]
        self._adapters: dict[str, Adapter] = {}
        for stage in stages if spec.lora is not None else ():
            attach_adapters(stage, self.architecture, spec)
            self._adapters |= adapters(stage)
        held = {name: p for stage in stages for name, p in stage.numbered_parameters().items()}
        # what is trained, and so what has gradients, moments and a place in checkpoints
        self._parameters = {name: p for name, p in held.items() if p.requires_grad}
        self._base = {name: p for name, p in held.items() if not is_adapter(name)}
        self._load(self._start())
        self._stages = [_wrap(stage, spec, first=i == 0) for i, stage in enumerate(stages)]
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=spec.lr,
                min_lr=spec.min_lr,
                adam_beta1=spec.betas[0],
                adam_beta2=spec.betas[1],
                adam_eps=spec.eps,
                weight_decay=spec.weight_decay,
                clip_grad=spec.clip_grad,
                use_distributed_optimizer=spec.distributed_optimizer,
                overlap_param_gather=_gathers_late(spec),
                bf16=spec.bf16,
                params_dtype=stages[0].config.params_dtype,
            ),
            self._stages,
        )
        if parallel.device().type == "cpu":  # Megatron has a fused Adam for GPUs, torch one for the CPU
            for group in self._optimizer.param_groups:
                group["fused"] = True
        for stage in stages:
            stage.config.finalize_model_grads_func = _finalize
            stage.config.grad_scale_func = self._optimizer.scale_loss
            if spec.overlap:  # gradients are exchanged in the backward pass of the last micro-batch only
                without = [wrapped.no_sync for wrapped in self._stages]
                stage.config.no_sync_func = without if len(without) > 1 else without[0]
        self._rates = LearningRateSchedule(self._optimizer, spec)
        self._state = OptimizerState(self._optimizer, self._parameters)
        self._shards = ShardedCheckpoint(self._state, self._parameters, self.architecture)
        self._pipeline = Pipeline(self._stages, spec, self.architecture)
        self._reference = (
            ReferenceModel(self._parameters, self.architecture, self._frozen)
            if spec.lora is None
            else UnadaptedReference(self._adapters)
        )
        self._offload = Offload(
            (buffer.grad_data for stage in self._stages for buffer in (*stage.buffers, *stage.expert_parallel_buffers)),
            lambda: (*held.values(), *self._state.tensors()),
        )
        self._plans: dict[str, ExportPlan] = {}  # how what is streamed is gathered, by what it is
        self._asleep = False
        self._stale = False  # whether other ranks' parts of the weights are those before the last step
        self._spikes: dict[str, SpikeMonitor] = {}
        self.updates = 0  # optimizer steps taken

    def _start(self) -> SafeTensors | RandomTensors:
        """The weights that training starts from."""
        if self.spec.init == "folder":
            return SafeTensors.of_folder(Path(self.spec.model))
        drawn = {name: parameter for name, parameter in self._base.items() if name != VALUE_HEAD}
        return RandomTensors(full_shapes(drawn, self.architecture), std=self.architecture.init_std, seed=self.spec.seed)

    def _frozen(self) -> SafeTensors | RandomTensors:
        """The reference's weights."""
        return SafeTensors.of_folder(Path(self.spec.reference)) if self.spec.reference else self._start()

    def _load(self, source: SafeTensors | RandomTensors) -> None:
        """Weights from full tensors; a critic's head keeps its fresh start where there is none."""
        held = {
            name: parameter
            for name, parameter in self._base.items()
            if name != VALUE_HEAD or weight_mappings([name])[0].tensors[0] in source
        }
        import_weights(held, self.architecture, source)
        if (lora := self.spec.lora) is not None:
            import_weights(
                self._low_rank(),
                self.architecture,
                AdapterFolder(Path(lora.adapter), lora)
                if lora.adapter
                else lambda name: LazyTensor.of(initial_adapter(self.architecture, lora, name)),
            )

    def _low_rank(self) -> dict[str, Tensor]:
        """This rank's shards of the adapters."""
        return {name: p for name, p in self._parameters.items() if is_adapter(name)}

    def score(self, microbatches: Sequence[Microbatch], *, reference: bool = False) -> list[Tensor]:
        """Per micro-batch the log-probabilities [N] of its labels, after temperature; of a critic its values [N].

        float32 on the CPU, the same on every rank; nothing is trained. With `reference`, by the frozen weights of
        `spec.reference` or else of `spec.model`, read from there on first use and kept as one copy of the shard; a
        policy with adapters leaves them out, and keeps no copy.
        """
        if reference:  # what is put back afterwards must be whole
            self._settle()
        self._check_awake()
        with self._reference.swapped_in() if reference else nullcontext():
            return [score.float().cpu() for score in self._pipeline.score(microbatches)]

    def update(self, microbatches: Sequence[Microbatch]) -> dict[str, float]:
        """One optimizer step on all of `microbatches`; returns metrics, the same on every rank.

        Gradients are finished agent by agent, so each agent's own gradient norm is known even when agents share the
        policy. A step whose gradient is not finite, or with `spec.skip_spikes` a spike, leaves every parameter and
        the optimizer untouched, on all ranks alike.
        """
        self._check_awake()
        agents = {
            agent: list(own)
            for agent, own in itertools.groupby(sorted(microbatches, key=lambda m: m.agent), key=lambda m: m.agent)
        }
        total = {name: torch.zeros_like(p.main_grad) for name, p in self._parameters.items()} if len(agents) > 1 else {}
        metrics: dict[str, float] = {}
        for agent, own in agents.items():
            metrics |= {f"agent/{agent}/{name}": value for name, value in self._accumulate(own).items()}
            metrics[f"agent/{agent}/grad_spikes"] = float(self._spike(agent, metrics[f"agent/{agent}/grad_norm"]))
            for name, gradient in total.items():
                gradient += self._parameters[name].main_grad
        for name, gradient in total.items():
            self._parameters[name].main_grad.copy_(gradient)
        return metrics | self._step()

    def _accumulate(self, microbatches: list[Microbatch]) -> dict[str, float]:
        """Gradients of one agent's micro-batches into `main_grad`, with its metrics."""
        for stage in self._stages:
            stage.zero_grad_buffer()
        self._optimizer.zero_grad()
        rows = self._pipeline.backward(microbatches)
        return {"grad_norm": self._norm()} | summarise(rows, _of_all_ranks)

    def _norm(self) -> float:
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def _spike(self, of: str, norm: float) -> bool:
        return self._spikes.setdefault(of, SpikeMonitor(self.spec.spike_factor)).observe(norm)

    def _step(self) -> dict[str, float]:
        lr = self._rates.set(self.updates)
        norm = self._norm()
        spike = self._spike(_POLICY, norm)
        skipped = not math.isfinite(norm) or (spike and self.spec.skip_spikes)
        if not skipped:
            self._optimizer.step()
            self._stale = _gathers_late(self.spec)
            self.updates += 1
        return {"grad_norm": norm, "lr": lr, "grad_spikes": float(spike), "skipped_updates": float(skipped)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream (Hugging Face name, full tensor), adapters merged into their base; every rank must drain it."""
        return _joined(self.weight_blocks())

    def weight_blocks(self) -> Iterator[tuple[str, list[Tensor]]]:
        """`weights`, but each tensor in blocks of its rows, which are copied nowhere if no rank has part of them."""
        self._settle()
        return self._stream("weights", MergedWeights(self._base, self._adapters))

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Stream (PEFT name, full tensor) of the adapters, none where all weights are trained; as `weights`."""
        self._settle()
        return _joined(self._stream("adapter", self._low_rank()))

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Stream (Hugging Face or PEFT name, full gradient) of the last update, clipped; every rank must drain it."""
        return _joined(self._stream("gradients", self._state.gradients()))

    def _stream(self, what: str, local: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
        if what not in self._plans:
            self._plans[what] = plan_export(local, self.architecture)
        return export_weights(local, self.architecture, self._plans[what])

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
            raise RuntimeError("the trainer is asleep and holds no memory to work in; call wake() first")

    def _settle(self) -> None:
        """Every rank's weights are those after the last step, also where they are gathered no sooner than needed."""
        self._check_awake()
        if self._stale:
            for stage in self._stages:
                stage.start_param_sync(force_sync=True)
            self._stale = False

    def write_model(self, folder: Path) -> None:
        """Write a Hugging Face folder: these weights with the config and tokenizer of the model it started from.

        Adapters are merged into the weights, and are by themselves in its subfolder adapter.
        """
        full = _keep(self.weights())
        if torch.distributed.get_rank() == 0:
            write_folder(Path(self.spec.model), folder, full)
        torch.distributed.barrier()
        if self.spec.lora is not None:
            self.write_adapter(folder / "adapter")

    def write_adapter(self, folder: Path) -> None:
        """Write the adapters in PEFT's format.

        Raises:
            ModelError: all weights are trained, and there are no adapters.
        """
        if self.spec.lora is None:
            raise ModelError(f"{folder}: nothing written; the policy trains all weights and has no adapter")
        full = _keep(self.adapter())
        if torch.distributed.get_rank() == 0:
            write_adapter(folder, self.spec.model, self.spec.lora, full)
        torch.distributed.barrier()

    def save(self, folder: Path) -> None:
        """Copy this rank's share of weights and optimizer state, which a thread then writes into `folder`.

        The files name Hugging Face tensors and hold no layout: `restore` reads them in any other.
        """
        self._check_awake()
        spikes = {of: monitor.state() for of, monitor in self._spikes.items()}
        self._shards.save(folder, {"updates": self.updates, "spikes": spikes})

    def written(self) -> dict[str, Digest]:
        """Wait until what `save` copied is on disk; size and digest of this rank's files by name.

        Raises:
            OSError: it could not be written.
        """
        return self._shards.written()

    def restore(self, folder: Path) -> None:
        """Continue from what `save` wrote, in whatever layout it was written.

        Raises:
            ModelError: it is of another model, or not all there.
        """
        self._settle()
        saved = self._shards.restore(folder)
        self.updates = saved["updates"]
        self._spikes = {}
        for of, state in saved["spikes"].items():
            self._spikes[of] = SpikeMonitor(self.spec.spike_factor)
            self._spikes[of].load(state)


def _joined(stream: Iterator[tuple[str, list[Tensor]]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, whole(blocks)) for name, blocks in stream)


def _keep(stream: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """All tensors of a stream on the CPU of rank 0; nothing on the others, which drain it."""
    writer = torch.distributed.get_rank() == 0
    return {name: tensor.cpu().contiguous() for name, tensor in stream if writer}


def _wrap(stage: PackedGPTModel, spec: TrainerSpec, *, first: bool) -> DistributedDataParallel:
    """One stage of this rank, with its gradients in float32 buffers that data-parallel ranks sum."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=spec.distributed_optimizer,
        overlap_grad_reduce=spec.overlap,
        overlap_param_gather=_gathers_late(spec),
        bucket_size=spec.bucket,
    )
    module = Float16Module(stage.config, stage) if spec.bf16 else stage
    return DistributedDataParallel(stage.config, config, module, disable_bucketing=not first)


def _gathers_late(spec: TrainerSpec) -> bool:
    """Whether the weights that other ranks have stepped are fetched in the next forward pass, layer by layer.

    Those of adapters are few, and held by modules that Megatron does not see called: they are fetched at once.
    """
    return spec.overlap and spec.distributed_optimizer and spec.lora is None


def _of_all_ranks(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's part of a measurement, one for each data-parallel rank and nothing from the others."""
    return parallel.exchange(part if parallel.speaks() else {})


def _finalize(model: list[torch.nn.Module], _num_tokens: Tensor, **groups: Any) -> None:
    # the denominator is already in the token weights: reduce over ranks, do not divide
    finalize_model_grads(model, None, **groups)
