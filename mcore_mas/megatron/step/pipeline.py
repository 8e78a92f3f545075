"""Forward and backward passes of micro-batches through Megatron's pipeline schedule, and statistics of their tokens."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from mcore_mas.equations.divergence import gap_statistics, histogram_quantile, log_histogram
from mcore_mas.equations.losses import TokenBatch
from mcore_mas.megatron.batch import CostModel, Microbatch, balance_work
from mcore_mas.megatron.device import rank_device, use_triton
from mcore_mas.megatron.model.decoder import PackedGPTModel
from mcore_mas.megatron.model.layout import PackedTrees, TileSizes
from mcore_mas.megatron.rank_watch import heartbeat
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.transfer import download, prefetch
from rollout.models.architecture import Architecture

# by name: sum, number of tokens, minimum, maximum, or of a percentile its histogram; plain, to be sent around
_Part: TypeAlias = dict[str, list[float]]


def summarise(
    rows: Sequence[dict[str, Tensor]],
    exchange: Callable[[_Part], Iterable[_Part]] = lambda part: [part],
) -> dict[str, float]:
    """The number of tokens, the loss summed, and other statistics reduced as their names end, by the mean if not so.

    `_count` is a sum, `_max` and `_min` are extremes, `_p99` is the 99th percentile, 5 % too large at most. Tokens
    whose statistic is NaN do not have it, and a statistic that no token has is left out.

    Args:
        rows: of each micro-batch its statistics by name, each [N]; token weights are in the loss already.
        exchange: gives the parts of all ranks for this one's, in the same order on each.
    """
    own = _merge({name: _part(name, column) for name, column in row.items()} for row in rows)
    whole = _merge(exchange(own))
    total, tokens, *_ = whole.pop("loss")
    summary = {"loss": total, "tokens": tokens}
    for name, numbers in whole.items():
        if name.endswith("_p99"):
            summary |= {name: histogram_quantile(numbers, 0.99)} if any(numbers) else {}
            continue
        total, count, smallest, largest = numbers
        if count:
            reduced = {"max": largest, "min": smallest, "count": total}
            summary[name] = reduced.get(name.rpartition("_")[2], total / count)
    return summary


def _part(name: str, column: Tensor) -> list[float]:
    known = column.double()
    if name != "loss":
        numbers = (
            known.numpy()
        )  # by a mask torch selects with all threads, which took 4 ms of a column on 16
        known = torch.from_numpy(numbers[~np.isnan(numbers)])
    if name.endswith("_p99"):
        return log_histogram(known)
    if not len(known):
        return [0.0, 0.0, math.inf, -math.inf]
    return [float(known.sum()), float(len(known)), float(known.min()), float(known.max())]


def _merge(parts: Iterable[_Part]) -> _Part:
    whole: _Part = {}
    for part in parts:
        for name, new in part.items():
            known = whole.get(name)
            if known is None:
                whole[name] = new
            elif name.endswith("_p99"):
                whole[name] = [one + other for one, other in zip(known, new, strict=True)]
            else:
                whole[name] = [
                    known[0] + new[0],
                    known[1] + new[1],
                    min(known[2], new[2]),
                    max(known[3], new[3]),
                ]
    return whole


TokenStatistics = dict[str, Tensor]  # statistics by name, each [N]
_Output = tuple[Tensor, ...]  # log-probabilities and entropies, or values, each [n]


@dataclass(frozen=True, slots=True)
class _Input:
    """What a rank computes with of a micro-batch."""

    whole: Microbatch
    part: Microbatch  # of this context-parallel rank
    rows: Tensor  # [n] which of the whole's rows those of the part are
    layout: PackedTrees
    entropy: bool  # whether a row's entropy is in the loss
    kl: bool  # whether a row may have a KL term


_Judge: TypeAlias = Callable[[_Output, _Input], tuple[Tensor, TokenStatistics]]


def _tiles(spec: TrainerSpec, a: Architecture, device: torch.device) -> TileSizes | None:
    """Those of Triton's attention, or None where torch's kernels attend."""
    if spec.attention == "torch" or not use_triton(device):
        return None
    gpu: Any = torch.cuda.get_device_properties(device)
    room = gpu.shared_memory_per_block_optin >> 10
    if TileSizes.least_room(a.head_dim, spec.bf16) > room:
        return None
    # context-parallel ranks repeat the key/value heads that they lack
    shared = a.heads // spec.tp // math.lcm(a.kv_heads // spec.tp, spec.cp)
    return TileSizes.of(shared, a.head_dim, spec.bf16, room)


class _KnownShapes(P2PCommunicator):
    """Sends activations and gradients between pipeline stages, each rank knowing the shapes that come.

    Where micro-batches differ in length, Megatron's stages send each other the shapes first, and wait for the GPU to
    read them: twice for each micro-batch.
    """

    def __init__(self, config: TransformerConfig, shapes: Sequence[tuple[int, int, int]]) -> None:
        """`shapes` are those of all micro-batches, in order: [tokens of a rank, 1, hidden]."""
        super().__init__(pp_group=parallel_state.get_pipeline_model_parallel_group(), config=config)
        self._activations, self._gradients = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: object, tensor_send_prev: object, recv_prev: bool, recv_next: bool
    ) -> tuple[object, object]:
        return next(self._activations) if recv_prev else None, next(
            self._gradients
        ) if recv_next else None


class Pipeline:
    """One rank's part of the passes over micro-batches; all ranks of the process group make the same calls."""

    def __init__(
        self, stages: Sequence[torch.nn.Module], spec: TrainerSpec, architecture: Architecture
    ) -> None:
        """`stages` are this rank's parts of the model, as wrapped for training, first to last."""
        self._stages = list(stages)
        self._spec = spec
        self._cost = CostModel.of(spec, architecture)
        self._run = get_forward_backward_func()
        self._device = rank_device()
        self._uploads = None if self._device.type == "cpu" else torch.cuda.Stream()
        self._tiles = _tiles(spec, architecture, self._device)
        self._experts = architecture.experts
        # into how many parts ranks cut a micro-batch's tokens
        self._multiple = spec.cp * (spec.tp if spec.sp else 1)

    def backward(self, microbatches: Sequence[Microbatch]) -> list[TokenStatistics]:
        """Add the gradients of Σ weight · loss to `main_grad`, summed over data-parallel ranks (gradient accumulation).

        Args:
            microbatches: those of all data-parallel ranks, at least one.

        Returns:
            Statistics of this rank's micro-batches on the last pipeline stage, none on the others.
        """
        rows = self._pass(microbatches, forward_only=False).values()
        there = iter(download([column for row in rows for column in row.values()]))
        return [{name: next(there) for name in row} for row in rows]

    def score(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Each micro-batch's log-probabilities of its labels [N], on every rank; of a critic its values [N].

        They are on the CPU.
        """
        if not microbatches:
            return []
        with torch.no_grad():
            rows = self._pass(microbatches, forward_only=True)
        lengths = [len(batch.labels) for batch in microbatches]
        scores = torch.zeros(sum(lengths), device=self._device)
        if speaks():
            places = scores.split(lengths)
            for i, row in rows.items():
                places[i].copy_(row["score"])
        # every number is one rank's, and zero on the others: the sum is exact
        torch.distributed.all_reduce(scores)
        return list(scores.cpu().split(lengths))

    def _pass(
        self, microbatches: Sequence[Microbatch], *, forward_only: bool
    ) -> dict[int, TokenStatistics]:
        """One pass over this data-parallel rank's micro-batches, of which there may be none.

        Returns:
            What the last pipeline stage says of each by its place among all; the others say nothing.
        """
        ranks = balance_work([self._cost.work_of(batch) for batch in microbatches], self._spec.dp)
        own = ranks[parallel_state.get_data_parallel_rank()]
        # gradients are exchanged in the pass, so nobody may stay away; experts are in every micro-batch of every rank
        rounds = max(1, len(own)) if self._spec.ep == 1 else max(map(len, ranks))
        turns = (
            self._spec.pp if self._spec.vpp > 1 else 1
        )  # interleaved stages take turns of pp each
        batches = [microbatches[i] for i in own]
        batches += [microbatches[0].idle()] * (-(-rounds // turns) * turns - len(own))
        lengths = self._lengths(batches)
        iterators = [
            prefetch(map(self._planned, batches, lengths), self._device, self._uploads)
            for _ in self._stages
        ]
        ways = self._between_stages(lengths) if self._spec.pp > 1 and self._spec.vpp == 1 else {}
        rows: list[TokenStatistics] = self._run(
            forward_step_func=partial(self._step, self._score if forward_only else self._train),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._stages,
            num_microbatches=len(batches),
            seq_length=lengths[0],  # read where lengths are equal: between interleaved stages
            micro_batch_size=1,
            forward_only=forward_only,
            **ways,
        )
        return dict(zip(own, rows[: len(own)], strict=True)) if rows else {}

    def _planned(self, batch: Microbatch, tokens: int) -> _Input:
        batch = batch.padded(tokens)
        part, rows = batch.part(self._spec.cp, parallel_state.get_context_parallel_rank())
        layout = PackedTrees.of(batch.segments, self._device.type, self._tiles)
        # what is asked of numbers is asked here: asking the GPU would wait for it
        with_kl = batch.reference is not None or bool(batch.kl_coef.any())
        return _Input(batch, part, rows, layout, entropy=bool(batch.entropy_coef.any()), kl=with_kl)

    def _between_stages(self, lengths: Sequence[int]) -> dict[str, Any]:
        """How stages that are not interleaved send each other micro-batches of these lengths, and Megatron's groups."""
        config = get_model_config(self._stages[0])
        shapes = [(tokens // self._multiple, 1, config.hidden_size) for tokens in lengths]
        names = ["tp", "pp", "cp", "dp", "embd", "pos_embd", "dp_cp", "tp_dp_cp"]
        groups = ProcessGroupCollection.use_mpu_process_groups(names)
        return {"p2p_communicator": _KnownShapes(config, shapes), "pg_collection": groups}

    def _lengths(self, batches: Sequence[Microbatch]) -> list[int]:
        """To how many tokens each micro-batch is padded."""
        lengths = [-(-len(batch.token_ids) // self._multiple) * self._multiple for batch in batches]
        # Interleaved stages send activations and gradients between the same two ranks at once; Megatron's messages
        # about their lengths, unlike those with the data, do not keep the two apart: there all have one length.
        return [max(lengths)] * len(lengths) if self._spec.vpp > 1 else lengths

    def _step(
        self, judge: _Judge, batches: Iterator[_Input], model: torch.nn.Module
    ) -> tuple[Tensor | _Output, Any]:
        """What the head says of this rank's part of a micro-batch, or what the next stage is sent; and what follows."""
        heartbeat()
        given = next(batches)
        part, layout = given.part, given.layout
        decoder: PackedGPTModel = unwrap_model(model)
        decoder.rotary_pos_emb.position_ids = part.position_ids
        decoder.rotary_pos_emb.positions = layout.positions
        decoder.ask(part, layout)
        layout.routing = self._routing(part)
        output: Tensor | _Output = model(part.token_ids[None], None, None, packed_seq_params=layout)

        def judged(output: _Output) -> tuple[Tensor, Tensor, TokenStatistics]:
            count = len(given.whole.labels)
            whole = (
                output
                if self._spec.cp == 1
                else tuple(_join(torch.stack(output), given.rows, count))
            )
            loss, statistics = judge(whole, given)
            return loss, torch.full((), count, dtype=torch.int, device=loss.device), statistics

        return output, judged

    def _routing(self, part: Microbatch) -> Tensor | None:
        """Which experts the sampler sent this rank's tokens to [tokens, sparse layers, k]."""
        if part.routing is None or self._experts is None:
            return None
        numbers = part.routing.view(torch.uint8 if self._experts.number_bytes == 1 else torch.int16)
        parts = numbers.chunk(self._spec.tp if self._spec.sp else 1)
        own = parts[parallel_state.get_tensor_model_parallel_rank() % len(parts)]
        routing: Tensor = own.unflatten(1, (-1, self._experts.per_token))
        return routing

    def _score(self, predicted: _Output, _: _Input) -> tuple[Tensor, TokenStatistics]:
        return predicted[0].new_zeros(()), {"score": predicted[0]}

    def _train(self, predicted: _Output, given: _Input) -> tuple[Tensor, TokenStatistics]:
        per_token, rows = (self._policy_loss if self._spec.head == "policy" else self._value_loss)(
            predicted, given
        )
        weights = given.whole.weights
        rows["loss"] = per_token.detach() * weights
        return (per_token * weights).sum(), rows

    def _policy_loss(self, predicted: _Output, given: _Input) -> tuple[Tensor, TokenStatistics]:
        logprobs, entropy = predicted
        batch = given.whole
        tokens = TokenBatch(
            logprobs=logprobs,
            behaviour=batch.behaviour,
            advantages=batch.advantages,
            sequences=batch.sequences,
            entropy=entropy if given.entropy else entropy.detach(),
            kl_coef=batch.kl_coef if given.kl else None,
            entropy_coef=batch.entropy_coef,
            proximal=batch.proximal,
            reference=batch.reference,
        )
        loss, statistics = self._spec.objective(tokens)  # type: ignore[call-arg, arg-type]
        behaviour, started = batch.behaviour, logprobs
        if (
            batch.proximal is not None
        ):  # earlier updates of the step have changed the weights that the sampler had
            started = torch.where(batch.proximal.isnan(), logprobs, batch.proximal)
        if (
            batch.ages is not None
        ):  # a reply of other weights, or begun on their keys, says nothing of an engine
            behaviour = torch.where(batch.ages > 0, torch.nan, behaviour)
        return loss, {
            "entropy": entropy.detach(),
            **gap_statistics(started, behaviour),
            **statistics,
        }

    def _value_loss(self, predicted: _Output, given: _Input) -> tuple[Tensor, TokenStatistics]:
        batch = given.whole
        assert batch.values is not None and batch.returns is not None, (
            "a critic's samples carry values and returns"
        )
        return self._spec.objective(predicted[0], batch.values, batch.returns)  # type: ignore[call-arg, arg-type]


def speaks() -> bool:
    """Whether this rank knows what the head put out and no other of its data-parallel rank is to say it too."""
    first = (
        parallel_state.get_tensor_model_parallel_rank()
        == parallel_state.get_context_parallel_rank()
        == 0
    )
    return bool(first and parallel_state.is_pipeline_last_stage())


def _join(values: Tensor, rows: Tensor, total: int) -> Tensor:
    """All N = `total` rows [k, N] on every context-parallel rank, from each rank's `values` [k, n] of its `rows` [n].

    Every rank goes on with the same numbers to the same loss, so the gradient of a row is already whole: each rank
    takes that of its own.
    """
    whole = values.new_zeros(len(values), total).index_copy(1, rows, values)
    # every number is one rank's, and zero on the others: the sum is exact
    return cast(
        Tensor,
        reduce_from_tensor_model_parallel_region(
            whole, parallel_state.get_context_parallel_group()
        ),
    )
