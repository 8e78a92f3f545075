"""One policy's trainer: an update on micro-batches, and its weights as a stream."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import save_file
from torch import Tensor

from mcore_mas.core.losses import LOSSES, Tokens
from mcore_mas.megatron import parallel
from mcore_mas.megatron.attention import PackedTrees
from mcore_mas.megatron.batch import Microbatch
from mcore_mas.megatron.logprobs import select_logprobs
from mcore_mas.megatron.models import build_model, read_architecture
from mcore_mas.megatron.weights import TensorFolder, gather, scatter, write_folder
from rollout.registry import lookup

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What one policy's trainer needs to know; plain data, so that it travels to every rank."""

    model: str  # Hugging Face folder
    tp: int = 1
    lr: float = 1e-6
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    loss: str = "ppo_clip"  # name in LOSSES
    loss_options: Mapping[str, float] = field(default_factory=dict)


class MegatronTrainer:
    """Trains one policy; every rank of the policy's process group holds one and makes the same calls."""

    def __init__(self, spec: TrainerSpec) -> None:
        """Load `spec.model` into this rank's shard. The process group must exist (`parallel.start`).

        Raises:
            ModelError: the folder is no supported model, or `spec.tp` cannot cut it.
        """
        self.spec = spec
        self.architecture = read_architecture(Path(spec.model))
        self.architecture.check_layout(spec.tp)
        self._gpt = build_model(self.architecture).to(parallel.device())
        self._parameters = dict(self._gpt.named_parameters())
        scatter(self._parameters, self.architecture, TensorFolder(Path(spec.model)))
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        self._model = DistributedDataParallel(self._gpt.config, ddp, self._gpt)
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=spec.lr,
                min_lr=spec.lr,
                adam_beta1=spec.betas[0],
                adam_beta2=spec.betas[1],
                adam_eps=spec.eps,
                weight_decay=spec.weight_decay,
                clip_grad=spec.clip_grad,
                params_dtype=torch.float32,
            ),
            [self._model],
        )
        self._gpt.config.finalize_model_grads_func = _finalize
        self._gpt.config.grad_scale_func = self._optimizer.scale_loss
        self._run = get_forward_backward_func()
        self._loss = lookup("loss", spec.loss, LOSSES)
        self.updates = 0  # optimizer steps taken

    def update(self, microbatches: Sequence[Microbatch]) -> dict[str, float]:
        """One optimizer step on all of `microbatches`; returns metrics, the same on every rank.

        Gradients are finished agent by agent, so each agent's own gradient norm is known even when agents share the
        policy. A step whose gradient is not finite leaves every parameter untouched, on all ranks alike.
        """
        agents = {
            agent: list(own)
            for agent, own in itertools.groupby(sorted(microbatches, key=lambda m: m.agent), key=lambda m: m.agent)
        }
        total = {name: torch.zeros_like(p.main_grad) for name, p in self._parameters.items()} if len(agents) > 1 else {}
        metrics: dict[str, float] = {}
        for agent, own in agents.items():
            metrics |= {f"agent/{agent}/{name}": value for name, value in self._accumulate(own).items()}
            for name, gradient in total.items():
                gradient += self._parameters[name].main_grad
        for name, gradient in total.items():
            self._parameters[name].main_grad.copy_(gradient)
        return metrics | self._step()

    def _accumulate(self, microbatches: list[Microbatch]) -> dict[str, float]:
        """Gradients of one agent's micro-batches into `main_grad`, with its metrics."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        rows = self._run(
            forward_step_func=self._forward,
            data_iterator=iter(microbatches),
            model=[self._model],
            num_microbatches=len(microbatches),
            seq_length=0,  # both sizes matter to pipeline stages only
            micro_batch_size=1,
            forward_only=False,
        )
        self._optimizer.prepare_grads()
        return {"grad_norm": float(self._optimizer.get_grad_norm())} | _summarise(rows)

    def _forward(self, batches: Iterator[Microbatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
        batch = next(batches)
        device = parallel.device()
        self._gpt.rotary_pos_emb.position_ids = batch.position_ids.to(device)
        logits = model(
            batch.token_ids[None].to(device),
            None,
            None,
            packed_seq_params=PackedTrees.of(batch.trees, device),
        )  # [1, T, vocabulary / tp]

        def loss(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return self._batch_loss(logits[0], batch)

        return logits, loss

    def _batch_loss(self, logits: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        device = logits.device
        logprobs, entropy = select_logprobs(
            logits[batch.predictors.to(device)],
            batch.labels.to(device),
            batch.temperatures.to(device),
            self.architecture.vocab,
        )
        behaviour = batch.behaviour.to(device)
        tokens = Tokens(logprobs=logprobs, behaviour=behaviour, advantages=batch.advantages.to(device))
        loss, statistics = self._loss(tokens, **self.spec.loss_options)
        weights = batch.weights.to(device)
        gap = (logprobs.detach() - behaviour).abs()
        rows = {"loss": loss.detach() * weights, "entropy": entropy, "logprob_gap": gap, **statistics}
        count = torch.tensor(len(loss), dtype=torch.int, device=device)
        return (loss * weights).sum(), count, rows

    def _step(self) -> dict[str, float]:
        lr = self.spec.lr * min(1.0, (self.updates + 1) / max(1, self.spec.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        skipped = not math.isfinite(norm)
        if not skipped:
            self._optimizer.step()
            self.updates += 1
        return {"grad_norm": norm, "lr": lr, "skipped_updates": float(skipped)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream (Hugging Face name, full tensor); every rank must drain it."""
        return gather(self._parameters, self.architecture)

    def write_model(self, folder: Path) -> None:
        """Write a Hugging Face folder: these weights with the config and tokenizer of the model it started from."""
        full = {name: tensor.cpu().contiguous() for name, tensor in self.weights()}
        if torch.distributed.get_rank() == 0:
            write_folder(Path(self.spec.model), folder, full)
        torch.distributed.barrier()

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into `folder` as full tensors under Hugging Face names.

        The files hold no layout: `restore` reads them at any tensor-parallel size. Rank 0 writes.
        """
        states = self._optimizer_states()
        tensors = {"model": self._parameters} | {
            moment: {name: states[p][moment] for name, p in self._parameters.items()}
            for moment in _MOMENTS
            if self.updates
        }
        writer = torch.distributed.get_rank() == 0
        if writer:
            folder.mkdir(parents=True, exist_ok=True)
        for file, local in tensors.items():
            full = {name: tensor.cpu().contiguous() for name, tensor in gather(local, self.architecture)}
            if writer:
                save_file(full, str(folder / f"{file}.safetensors"))
        if writer:
            (folder / "trainer.json").write_text(json.dumps({"updates": self.updates}))
        torch.distributed.barrier()

    def restore(self, folder: Path) -> None:
        """Continue from what `save` wrote, at whatever tensor-parallel size it was written."""
        self.updates = json.loads((folder / "trainer.json").read_text())["updates"]
        scatter(self._parameters, self.architecture, _SingleFile(folder / "model.safetensors"))
        if not self.updates:
            return
        states = self._optimizer_states()
        for parameter in self._parameters.values():
            state = states[parameter]
            state["step"] = torch.tensor(float(self.updates))  # one tensor each: Adam counts up in place
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(parameter, dtype=torch.float32)
        for moment in _MOMENTS:
            local = {name: states[p][moment] for name, p in self._parameters.items()}
            scatter(local, self.architecture, _SingleFile(folder / f"{moment}.safetensors"))

    def _optimizer_states(self) -> Mapping[Tensor, dict[str, Tensor]]:
        return self._optimizer.chained_optimizers[0].optimizer.state


class _SingleFile(TensorFolder):
    """The tensors of one safetensors file."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        with safe_open(str(path), "pt") as tensors:
            self._files = dict.fromkeys(tensors.keys(), path.name)
        self._folder = path.parent


def _finalize(model: list[torch.nn.Module], _num_tokens: Tensor, **groups: Any) -> None:
    # the denominator is already in the token weights: reduce over ranks, do not divide
    finalize_model_grads(model, None, **groups)


def _summarise(rows: list[dict[str, Tensor]]) -> dict[str, float]:
    """Token-level statistics of all micro-batches as one number each."""
    columns: dict[str, list[Tensor]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            columns[name].append(value)
    joined = {name: torch.cat(values) for name, values in columns.items()}
    summary = {name: float(value.mean()) for name, value in joined.items() if name not in ("loss", "logprob_gap")}
    summary["loss"] = float(joined["loss"].sum())
    summary["tokens"] = float(len(joined["loss"]))
    gap = joined["logprob_gap"]
    if gap.isfinite().all():  # NaN where the tokens were not sampled, as in supervised fine-tuning
        summary["logprob_gap_max"] = float(gap.max())
    return summary
