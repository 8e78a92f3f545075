"""Forward and backward passes of micro-batches through Megatron's pipeline schedule."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, cast

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from mcore_mas.equations.agreement import gap_statistics
from mcore_mas.equations.effective_samples import reply_statistics
from mcore_mas.equations.losses import Objective, TokenBatch
from mcore_mas.megatron.batch import CostModel, Microbatch, balance_work
from mcore_mas.megatron.device import rank_device, use_triton
from mcore_mas.megatron.model.decoder import PackedGPTModel
from mcore_mas.megatron.model.head_ops import RowGradients
from mcore_mas.megatron.model.layout import PackedTrees, TileSizes
from mcore_mas.megatron.rank_watch import heartbeat
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.statistics import TokenStatistics
from mcore_mas.megatron.transfer import download, prefetch
from rollout.models.architecture import Architecture

# Output of the last stage: (log-probabilities, entropies), or (values,) of a critic, each [n].
_Output: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _StageInput:
    """A micro-batch as a rank computes with it.

    Attributes:
        whole: the micro-batch with all of its tokens.
        part: tokens and rows of this context-parallel rank.
        rows: [n] index of each of the part's rows among the rows of `whole`.
        layout: attention layout of all tokens.
        has_entropy_loss: False if no row's loss uses the entropy.
        has_kl_loss: False if no row's loss can have a KL term.
    """

    whole: Microbatch
    part: Microbatch
    rows: Tensor
    layout: PackedTrees
    has_entropy_loss: bool
    has_kl_loss: bool


# Returns (loss, statistics) for the outputs of all rows of a micro-batch.
_LossFunction: TypeAlias = Callable[[_Output, _StageInput], tuple[Tensor, TokenStatistics]]


class Pipeline:
    """One rank's part of forward and backward passes; all ranks of the process group make the same calls."""

    def __init__(
        self, stages: Sequence[torch.nn.Module], spec: TrainerSpec, architecture: Architecture
    ) -> None:
        """Prepare the passes.

        Args:
            stages: this rank's pipeline stages, wrapped for training, first to last.
            spec: specification of the trainer.
            architecture: architecture of the model.
        """
        self._stages = list(stages)
        self._spec = spec
        self._cost = CostModel.of(spec, architecture)
        self._experts = architecture.experts
        self._run_schedule = get_forward_backward_func()
        self._device = rank_device()
        self._upload_stream = None if self._device.type == "cpu" else torch.cuda.Stream()
        self._tiles = choose_tile_sizes(spec, architecture, self._device)
        # Context and sequence parallelism split a micro-batch's tokens into this many equal parts.
        self._token_parts = spec.cp * (spec.tp if spec.sp else 1)

    def backward(self, microbatches: Sequence[Microbatch]) -> list[TokenStatistics]:
        """Accumulate the gradients of Σ weight · loss in `main_grad`, summed over ranks.

        Args:
            microbatches: those of all data-parallel ranks, at least one.

        Returns:
            Statistics of this rank's micro-batches on the last pipeline stage; [] on other stages.
        """
        on_device = list(self._pass(microbatches, forward_only=False).values())

        # The columns of all micro-batches are copied together, so that the host waits only once.
        columns: list[Tensor] = []
        for statistics in on_device:
            columns += statistics.values()
        downloaded = iter(download(columns))

        on_host: list[TokenStatistics] = []
        for statistics in on_device:
            batch_columns = islice(downloaded, len(statistics))
            on_host.append(dict(zip(statistics, batch_columns, strict=True)))
        return on_host

    def score(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Compute the log-probabilities of all labels, or a critic's values.

        Args:
            microbatches: those of all data-parallel ranks.

        Returns:
            Scores [N] of each micro-batch, on the CPU of every rank.
        """
        if not microbatches:
            return []
        with torch.no_grad():
            statistics_by_index = self._pass(microbatches, forward_only=True)

        lengths = [len(batch.labels) for batch in microbatches]
        scores = torch.zeros(sum(lengths), device=self._device)
        if reports_outputs():
            slots = scores.split(lengths)
            for index, statistics in statistics_by_index.items():
                slots[index].copy_(statistics["score"])
        # Every number is set by one rank and is zero on the others, so the sum is exact.
        torch.distributed.all_reduce(scores)
        return list(scores.cpu().split(lengths))

    def _pass(
        self, microbatches: Sequence[Microbatch], *, forward_only: bool
    ) -> dict[int, TokenStatistics]:
        """Run one pass over this data-parallel rank's micro-batches, of which there may be none.

        Args:
            microbatches: those of all data-parallel ranks.
            forward_only: True to compute scores, False to compute losses and their gradients.

        Returns:
            Statistics by the micro-batch's index in `microbatches`; {} before the last stage.
        """
        costs = [self._cost.batch_work(batch) for batch in microbatches]
        assignment = balance_work(costs, self._spec.dp)
        local_indices = assignment[parallel_state.get_data_parallel_rank()]
        batches = [microbatches[index] for index in local_indices]
        idle_count = self._batches_to_run(assignment, len(batches)) - len(batches)
        batches += [microbatches[0].idle()] * idle_count

        lengths = self._padded_lengths(batches)
        iterators = [
            prefetch(map(self._prepare_input, batches, lengths), self._device, self._upload_stream)
            for _ in self._stages
        ]
        is_interleaved = self._spec.vpp > 1
        communication = {}
        if self._spec.pp > 1 and not is_interleaved:
            communication = self._stage_communication(lengths)
        loss_function = self._zero_loss_and_scores if forward_only else self._weighted_loss
        statistics: list[TokenStatistics] = self._run_schedule(
            forward_step_func=partial(self._forward_step, loss_function),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._stages,
            num_microbatches=len(batches),
            seq_length=lengths[0],  # used by interleaved stages only, where all lengths are equal
            micro_batch_size=1,
            forward_only=forward_only,
            **communication,
        )
        if not statistics:
            return {}
        # The idle micro-batches come last, and have no index.
        return dict(zip(local_indices, statistics[: len(local_indices)], strict=True))

    def _batches_to_run(self, assignment: Sequence[Sequence[int]], assigned: int) -> int:
        """Return the number of micro-batches that this rank must run, idle ones included.

        Ranks exchange gradients during the pass, so each must run at least one. With expert
        parallelism each micro-batch involves the experts of all ranks, so all run equally many.
        Interleaved stages run them in groups of pp.

        Args:
            assignment: indices of the micro-batches of each data-parallel rank.
            assigned: number of micro-batches of this rank.
        """
        needed = max(1, assigned)
        if self._spec.ep > 1:
            needed = max(map(len, assignment))
        group_size = self._spec.pp if self._spec.vpp > 1 else 1
        return -(-needed // group_size) * group_size

    def _prepare_input(self, batch: Microbatch, tokens: int) -> _StageInput:
        """Pad a micro-batch to `tokens` and lay it out, on the CPU."""
        batch = batch.padded(tokens)
        if self._device.type == "cpu":
            # A user's loss may write to the columns, and the caller's may be read-only. An upload
            # to a GPU is a copy anyway.
            batch = batch.copy()
        part, rows = batch.context_parallel_part(
            self._spec.cp, parallel_state.get_context_parallel_rank()
        )
        layout = PackedTrees.of(batch.segments, self._device.type, self._tiles)
        # Values are tested here, because testing them on the GPU would make the host wait.
        return _StageInput(
            whole=batch,
            part=part,
            rows=rows,
            layout=layout,
            has_entropy_loss=bool(batch.entropy_coef.any()),
            has_kl_loss=batch.reference is not None or bool(batch.kl_coef.any()),
        )

    def _stage_communication(self, lengths: Sequence[int]) -> dict[str, Any]:
        """Return arguments of Megatron's schedule for pipeline stages that are not interleaved."""
        config = get_model_config(self._stages[0])
        shapes = [(tokens // self._token_parts, 1, config.hidden_size) for tokens in lengths]
        groups = ["tp", "pp", "cp", "dp", "embd", "pos_embd", "dp_cp", "tp_dp_cp"]
        return {
            "p2p_communicator": _KnownShapes(config, shapes),
            "pg_collection": ProcessGroupCollection.use_mpu_process_groups(groups),
        }

    def _padded_lengths(self, batches: Sequence[Microbatch]) -> list[int]:
        """Return the number of tokens that each micro-batch is padded to."""
        multiple = self._spec.token_multiple
        lengths = [-(-len(batch.token_ids) // multiple) * multiple for batch in batches]
        if self._spec.vpp == 1:
            return lengths
        # Interleaved stages send activations and gradients between the same two ranks at once.
        # Megatron keeps the data of the two apart, but not its messages about their lengths.
        return [max(lengths)] * len(lengths)

    def _forward_step(
        self, loss_function: _LossFunction, inputs: Iterator[_StageInput], model: torch.nn.Module
    ) -> tuple[Tensor | _Output, Any]:
        """Run the forward pass of a stage, as Megatron's schedule asks for it.

        Returns:
            The stage's output, and a function that computes (loss, number of rows, statistics) of
            the last stage's output.
        """
        heartbeat()
        stage_input = next(inputs)
        part = stage_input.part
        layout = stage_input.layout
        layout.routing = self._recorded_routing(part)

        decoder: PackedGPTModel = unwrap_model(model)
        decoder.rotary_pos_emb.position_ids = part.position_ids
        decoder.rotary_pos_emb.position_count = layout.longest_sequence
        decoder.prepare(part, layout, self._row_gradients(stage_input))
        output: Tensor | _Output = model(part.token_ids[None], None, None, packed_seq_params=layout)

        def compute_loss(output: _Output) -> tuple[Tensor, Tensor, TokenStatistics]:
            count = len(stage_input.whole.labels)
            if self._spec.cp > 1:
                output = tuple(_gather_rows(torch.stack(output), stage_input.rows, count))
            loss, statistics = loss_function(output, stage_input)
            row_count = torch.full((), count, dtype=torch.int, device=loss.device)
            return loss, row_count, statistics

        return output, compute_loss

    def _recorded_routing(self, part: Microbatch) -> Tensor | None:
        """Return the recorded experts of this rank's tokens [tokens, sparse layers, k].

        None if the micro-batch has no record, or the model has no experts.
        """
        if part.routing is None or self._experts is None:
            return None
        number_type = torch.uint8 if self._experts.index_bytes == 1 else torch.int16
        parts = part.routing.view(number_type).chunk(self._spec.tp if self._spec.sp else 1)
        own_part = parts[parallel_state.get_tensor_model_parallel_rank() % len(parts)]
        routing: Tensor = own_part.unflatten(1, (-1, self._experts.per_token))
        return routing

    def _zero_loss_and_scores(
        self, output: _Output, _: _StageInput
    ) -> tuple[Tensor, TokenStatistics]:
        return output[0].new_zeros(()), {"score": output[0]}

    def _row_gradients(self, stage_input: _StageInput) -> RowGradients | None:
        """Return a function that `logprobs_and_entropy` calls for the gradients of the loss of some rows.

        Return None if the gradient of a row depends on other rows, or if there is no backward pass.
        """
        objective = self._spec.objective
        is_by_token = isinstance(objective, Objective) and objective.is_by_token
        if not is_by_token or self._spec.cp > 1 or not torch.is_grad_enabled():
            return None

        def row_gradients(
            logprobs: Tensor, entropy: Tensor, rows: slice
        ) -> tuple[Tensor, Tensor | None]:
            logprobs = logprobs.detach().requires_grad_()
            entropy = entropy.detach().requires_grad_()
            with torch.enable_grad():
                tokens = self._token_batch((logprobs, entropy), stage_input, rows)
                losses, _ = self._spec.objective(tokens)  # type: ignore[call-arg, arg-type]
            weights = stage_input.whole.weights[rows]
            return torch.autograd.grad(losses, (logprobs, entropy), weights, allow_unused=True)  # type: ignore[return-value]

        return row_gradients

    def _weighted_loss(
        self, output: _Output, stage_input: _StageInput
    ) -> tuple[Tensor, TokenStatistics]:
        """Compute the weighted loss of a micro-batch and the statistics of its rows."""
        if self._spec.head == "policy":
            losses, statistics = self._policy_loss(output, stage_input)
        else:
            losses, statistics = self._value_loss(output, stage_input)
        weights = stage_input.whole.weights
        statistics["loss"] = losses.detach() * weights
        return (losses * weights).sum(), statistics

    def _policy_loss(
        self, output: _Output, stage_input: _StageInput
    ) -> tuple[Tensor, TokenStatistics]:
        """Compute losses [N] and statistics of a policy."""
        logprobs, entropy = output
        batch = stage_input.whole
        tokens = self._token_batch(output, stage_input, slice(None))
        losses, statistics = self._spec.objective(tokens)  # type: ignore[call-arg, arg-type]
        if self._spec.effective_samples:
            statistics |= reply_statistics(logprobs, batch.behaviour, batch.sequences)

        # The gap between trainer and engine is measured with the weights at the start of the step,
        # which earlier updates of the step have changed since.
        logprobs_at_start = logprobs
        if batch.proximal is not None:
            logprobs_at_start = torch.where(batch.proximal.isnan(), logprobs, batch.proximal)
        # Replies sampled with older weights, or begun on their KV cache, say nothing about the gap.
        behaviour = batch.behaviour
        if batch.ages is not None:
            behaviour = torch.where(batch.ages > 0, torch.nan, behaviour)
        gap = gap_statistics(logprobs_at_start, behaviour)
        return losses, {"entropy": entropy.detach(), **gap, **statistics}

    def _token_batch(self, output: _Output, stage_input: _StageInput, rows: slice) -> TokenBatch:
        """Return the objective's inputs for some rows, of which `output` is the head's output."""
        logprobs, entropy = output
        batch = stage_input.whole
        return TokenBatch(
            logprobs=logprobs,
            behaviour=batch.behaviour[rows],
            advantages=batch.advantages[rows],
            sequences=batch.sequences[rows],
            entropy=entropy if stage_input.has_entropy_loss else entropy.detach(),
            kl_coef=batch.kl_coef[rows] if stage_input.has_kl_loss else None,
            entropy_coef=batch.entropy_coef[rows],
            proximal=None if batch.proximal is None else batch.proximal[rows],
            reference=None if batch.reference is None else batch.reference[rows],
        )

    def _value_loss(
        self, output: _Output, stage_input: _StageInput
    ) -> tuple[Tensor, TokenStatistics]:
        """Compute losses [N] and statistics of a critic."""
        batch = stage_input.whole
        assert batch.values is not None and batch.returns is not None, (
            "a critic's samples carry values and returns"
        )
        return self._spec.objective(output[0], batch.values, batch.returns)  # type: ignore[call-arg, arg-type]


class _KnownShapes(P2PCommunicator):
    """Communicator between pipeline stages, each of which knows the shapes that it receives.

    If micro-batches differ in length, Megatron's stages send each other the shapes first, and wait
    for the GPU to read them: twice for each micro-batch.
    """

    def __init__(self, config: TransformerConfig, shapes: Sequence[tuple[int, int, int]]) -> None:
        """Prepare for one pass.

        Args:
            shapes: [tokens of a rank, 1, hidden] of each micro-batch, in their order.
        """
        super().__init__(pp_group=parallel_state.get_pipeline_model_parallel_group(), config=config)
        self._activation_shapes = iter(shapes)
        self._gradient_shapes = iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: object, tensor_send_prev: object, recv_prev: bool, recv_next: bool
    ) -> tuple[object, object]:
        activation_shape = next(self._activation_shapes) if recv_prev else None
        gradient_shape = next(self._gradient_shapes) if recv_next else None
        return activation_shape, gradient_shape


def reports_outputs() -> bool:
    """Return True on the one rank of each model replica that reports the head's outputs.

    This is the first tensor- and context-parallel rank of the last stage; the others of that stage have
    the same outputs.
    """
    is_first_copy = (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
    return bool(is_first_copy and parallel_state.is_pipeline_last_stage())


def _gather_rows(values: Tensor, rows: Tensor, total: int) -> Tensor:
    """Gather the values of all context-parallel ranks, in the order of the micro-batch's rows.

    In the backward pass no gradients are summed over ranks: every rank computes the same loss of all
    rows, so each has the complete gradients of its own values.

    Args:
        values: [k, n] of this rank.
        rows: [n] their index among all rows.
        total: N, number of all rows.

    Returns:
        [k, N] on every rank.
    """
    gathered = values.new_zeros(len(values), total).index_copy(1, rows, values)
    # Every number is set by one rank and is zero on the others, so the sum is exact.
    group = parallel_state.get_context_parallel_group()
    return cast(Tensor, reduce_from_tensor_model_parallel_region(gathered, group))


def choose_tile_sizes(
    spec: TrainerSpec, architecture: Architecture, device: torch.device
) -> TileSizes | None:
    """Return the tile sizes of Triton's attention kernels; None if torch's kernels are used."""
    if spec.attention == "torch" or not use_triton(device):
        return None
    gpu: Any = torch.cuda.get_device_properties(device)
    shared_memory_kib = gpu.shared_memory_per_block_optin >> 10
    if TileSizes.min_shared_memory_kib(architecture.head_dim, spec.bf16) > shared_memory_kib:
        return None

    # Context-parallel ranks repeat key/value heads that cannot be divided among them.
    kv_heads = math.lcm(architecture.kv_heads // spec.tp, spec.cp)
    heads_per_kv_head = architecture.heads // spec.tp // kv_heads
    return TileSizes.of(heads_per_kv_head, architecture.head_dim, spec.bf16, shared_memory_kib)
