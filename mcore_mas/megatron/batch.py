"""Micro-batches of packed prefix trees, their cost, and load balancing over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_mas.config.policy import LoraConfig
from mcore_mas.megatron.spec import TrainerSpec
from rollout.models.architecture import Architecture, read_architecture

# Columns of a micro-batch that have an entry for each token; the others have one for each row.
_TOKEN_COLUMNS = ("token_ids", "position_ids", "routing")

# Value of every byte in `Microbatch.routing` for a token whose experts were not recorded.
UNKNOWN_EXPERT = 255

# `CostModel.batch_counts` proposes up to this number times `pp` micro-batches for each data-parallel
# rank. More and smaller ones shorten the pipeline bubble: the time in which the stages wait for the
# first and the last micro-batch.
_MAX_BATCHES_PER_PIPELINE_RANK = 2

# `CostModel.sharing_cost` on a CPU, where attention to a shared segment is a call of its own, whose
# result is joined with those of the other calls. Measured with models of width 128 and 256: if all
# prompts shared their first 15 tokens, an update took 3 to 7 % longer than if these were repeated;
# with 40 shared tokens it took equally long. Triton's kernels need no such calls.
_CPU_SHARING_COST = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Node of a prefix tree: tokens that are stored once for all sequences that contain them.

    A token attends to itself, to the earlier tokens of its segment, and to all tokens of the
    segment's ancestors.

    Attributes:
        tokens: number of tokens.
        parent: index of the segment that this one continues; -1 for the first segment of a tree.
    """

    tokens: int
    parent: int = -1


def depths(segments: Sequence[Segment]) -> list[int]:
    """Return the depth of each segment: the number of tokens of all its ancestors."""
    result: list[int] = []
    for segment in segments:
        if segment.parent < 0:
            result.append(0)
        else:
            result.append(result[segment.parent] + segments[segment.parent].tokens)
    return result


def attention_pairs(segments: Sequence[Segment]) -> int:
    """Return the number of pairs of a query and a key that attention computes.

    The pair of each token with itself is included.
    """
    return sum(
        segment.tokens * (2 * depth + segment.tokens + 1) // 2
        for segment, depth in zip(segments, depths(segments), strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Prefix trees of one agent's sequences, packed end to end: T tokens, and N rows to train.

    Row n says that the model's output at token `predictors[n]` predicts the token `labels[n]`. One
    token may predict several labels, or the same label for several samples.

    Attributes:
        agent: name of the agent that produced the sequences.
        segments: depth first: a segment is followed by its descendants.
        tokens_without_sharing: number of tokens if every sample were stored separately.
        token_ids: [T] int64.
        position_ids: [T] int64; the positions of a segment continue those of its parent.
        predictors: [N] int64 indices into the T tokens.
        labels: [N] int64 token ids.
        temperatures: [N] float32.
        sequences: [N] int64 index of each row's sample among all samples that were packed.
        behaviour: [N] float32 log-probabilities under the sampler; NaN if it reported none.
        advantages: [N] float32.
        weights: [N] float32 weights in the loss, divided by the denominator of the update.
        kl_coef: [N] float32 coefficients of the KL term.
        entropy_coef: [N] float32 coefficients of the entropy bonus.
        proximal: [N] float32 log-probabilities under the weights of π_old. This and the next three
            columns are NaN in the rows of a sample that has no such values, and None if no sample
            has any.
        reference: [N] float32 log-probabilities under the frozen reference model.
        values: [N] float32 values of the critic at the start of the step.
        returns: [N] float32 targets of the critic.
        ages: [N] float32 number of weight updates since the oldest token of the reply was sampled;
            None if all replies were sampled with the latest weights.
        routing: [T, bytes] uint8 experts of each token, encoded as in `Completion.routing`;
            `UNKNOWN_EXPERT` in all bytes of a token without a record. None if no token has one.
        masks: [M, bytes] uint8 distinct sampling masks: bit `i % 8` of byte `i // 8` is 1 if token
            i may be sampled. The first mask allows all tokens. None if no sample has a grammar.
        mask_rows: [N] int64 index into `masks`; None if there are none.
    """

    agent: str
    segments: tuple[Segment, ...]
    tokens_without_sharing: int
    token_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    labels: Tensor
    temperatures: Tensor
    sequences: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    kl_coef: Tensor
    entropy_coef: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    ages: Tensor | None = None
    routing: Tensor | None = None
    masks: Tensor | None = None
    mask_rows: Tensor | None = None

    def select(self, selected: Tensor) -> Microbatch:
        """Return a micro-batch of the selected rows and of the segments that they depend on.

        `tokens_without_sharing` still counts the samples of all rows.

        Args:
            selected: [N] bool.
        """
        if selected.all():
            return self

        lengths = torch.tensor([segment.tokens for segment in self.segments])
        segment_of_token = torch.arange(len(self.segments)).repeat_interleave(lengths)  # [T]
        is_needed = torch.zeros(len(self.segments), dtype=torch.bool)
        is_needed[segment_of_token[self.predictors[selected]]] = True
        # Parents have smaller indices than their children, so a reverse pass marks all ancestors.
        for index in reversed(range(len(self.segments))):
            parent = self.segments[index].parent
            if is_needed[index] and parent >= 0:
                is_needed[parent] = True

        # The cumulative sum of a mask, minus 1, is the new index of each element that is kept.
        new_indices = (is_needed.cumsum(0) - 1).tolist()
        segments = []
        for segment, needed in zip(self.segments, is_needed.tolist(), strict=True):
            if needed:
                parent = new_indices[segment.parent] if segment.parent >= 0 else -1
                segments.append(replace(segment, parent=parent))

        needed_tokens = is_needed[segment_of_token]
        columns = self._index_columns(tokens=needed_tokens, rows=selected)
        columns["predictors"] = (needed_tokens.cumsum(0) - 1)[columns["predictors"]]
        return replace(self, segments=tuple(segments), **columns)

    def padded(self, tokens: int) -> Microbatch:
        """Return the micro-batch padded to T = `tokens`, by a tree that trains nothing."""
        extra = tokens - len(self.token_ids)
        if not extra:
            return self
        padding_positions = torch.arange(extra, device=self.position_ids.device)
        routing = self.routing
        if routing is not None:
            routing = F.pad(routing, (0, 0, 0, extra), value=UNKNOWN_EXPERT)
        return replace(
            self,
            segments=(*self.segments, Segment(tokens=extra)),
            token_ids=torch.cat([self.token_ids, self.token_ids.new_zeros(extra)]),
            position_ids=torch.cat([self.position_ids, padding_positions]),
            routing=routing,
        )

    def context_parallel_part(self, ranks: int, rank: int) -> tuple[Microbatch, Tensor]:
        """Return the part that one context-parallel rank computes.

        The part has T / ranks consecutive tokens, and the n rows whose predictors are among them. It
        keeps the segments of the whole micro-batch. T must be a multiple of `ranks`.

        Returns:
            The part, and the indices [n] int64 of its rows among the N rows.
        """
        if ranks == 1:
            return self, torch.arange(len(self.predictors))
        tokens = len(self.token_ids) // ranks
        start = tokens * rank
        stop = start + tokens
        is_predicted_here = (self.predictors >= start) & (self.predictors < stop)
        rows = is_predicted_here.nonzero()[:, 0]
        columns = self._index_columns(tokens=slice(start, stop), rows=rows)
        columns["predictors"] = columns["predictors"] - start
        return replace(self, **columns), rows

    def copy(self) -> Microbatch:
        """Return a micro-batch whose columns may be written.

        Routing and masks, which can be large, stay shared and must not be written.
        """
        columns: dict[str, Any] = {
            name: column.clone() for name, column in self._columns() if name != "routing"
        }
        return replace(self, **columns)

    def idle(self) -> Microbatch:
        """Return a micro-batch with the same columns, but one token and one row of weight 0.

        A rank without work computes it, so that it takes part in all collectives.
        """
        columns: dict[str, Any] = {
            name: column.new_zeros(1, *column.shape[1:]) for name, column in self._columns()
        }
        columns["temperatures"] = torch.ones_like(columns["temperatures"])
        if self.routing is not None:
            columns["routing"].fill_(UNKNOWN_EXPERT)
        return replace(self, segments=(Segment(tokens=1),), tokens_without_sharing=1, **columns)

    def _columns(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor of each column that is not None.

        `masks` is not a column, because its rows are neither tokens nor trained rows.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and field.name != "masks":
                yield field.name, value

    def _index_columns(self, *, tokens: slice | Tensor, rows: Tensor) -> dict[str, Any]:
        """Return the columns by name, indexed by `tokens` or by `rows`."""
        return {
            name: column[tokens if name in _TOKEN_COLUMNS else rows]
            for name, column in self._columns()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Estimate of the work of micro-batches, and of the time in which a trainer's ranks do it.

    Attributes:
        dp: number of data-parallel ranks.
        pp: number of pipeline ranks.
        vpp: number of interleaved stages on each pipeline rank.
        architecture: architecture of the model; None: every token costs the same.
        value_head: True for a critic.
        lora: adapters that are trained; None: all weights are trained.
        sharing_cost: extra cost of a token for each shared segment that it attends to, as a share
            of the cost of a token.
    """

    dp: int = 1
    pp: int = 1
    vpp: int = 1
    architecture: Architecture | None = None
    value_head: bool = False
    lora: LoraConfig | None = None
    sharing_cost: float = 0.0

    @classmethod
    def of(
        cls, spec: TrainerSpec, architecture: Architecture | None = None, *, cpu: bool = False
    ) -> CostModel:
        """Return the cost model of a trainer.

        Args:
            spec: specification of the trainer.
            architecture: architecture of `spec.model`; None: read it from that folder.
            cpu: True if the trainer runs on CPUs.
        """
        return cls(
            dp=spec.dp,
            pp=spec.pp,
            vpp=spec.vpp,
            architecture=architecture or read_architecture(spec.model),
            value_head=spec.head == "value",
            lora=spec.lora,
            sharing_cost=_CPU_SHARING_COST if cpu else 0.0,
        )

    @property
    def is_distributed(self) -> bool:
        """True if several data-parallel ranks or pipeline stages share the work."""
        return self.dp * self.pp > 1

    def work(self, tokens: int, pairs: int, rows: int) -> float:
        """Return the floating-point operations of a forward pass, or `tokens` for an unknown model.

        A backward pass takes twice as many. Operations of adapters are not counted.

        Args:
            tokens: number of tokens that go through the layers.
            pairs: number of pairs of a query and a key, see `attention_pairs`.
            rows: number of rows that go through the head, as in `Microbatch`.
        """
        architecture = self.architecture
        if architecture is None:
            return float(tokens)
        layers = architecture.layers
        hidden = architecture.hidden
        experts = architecture.experts

        # Every token is multiplied with these weights: of queries and attention outputs, of keys
        # and values, and of the dense layers' gate, up and down projections.
        attention_width = architecture.heads * architecture.head_dim
        kv_width = architecture.kv_heads * architecture.head_dim
        sparse_layers = sum(experts.sparse) if experts else 0
        weights = layers * hidden * (2 * attention_width + 2 * kv_width)
        weights += (layers - sparse_layers) * hidden * 3 * architecture.ffn
        if experts:
            # In a sparse layer these are the weights of the chosen experts, and of the router.
            weights += (
                sparse_layers * hidden * (3 * experts.per_token * experts.ffn + experts.count)
            )
        head_weights = hidden * (1 if self.value_head else architecture.vocab)

        # Attention multiplies queries with keys, and probabilities with values.
        attention = 2 * layers * pairs * attention_width
        return 2.0 * (tokens * weights + attention + rows * head_weights)

    def batch_work(self, batch: Microbatch) -> float:
        """Return `work` of a micro-batch."""
        return self.work(
            len(batch.token_ids), attention_pairs(batch.segments), len(batch.predictors)
        )

    def flops(self, *batches: Microbatch) -> float:
        """Return the floating-point operations of training on micro-batches, without recomputation.

        With full training they are three times those of the forward pass. With adapters, no
        gradients of frozen weights are computed, and the adapters' own operations are added.
        For an unknown model, the result is three times the number of tokens.
        """
        full_training = 3 * sum(map(self.batch_work, batches))
        architecture = self.architecture
        if self.lora is None or architecture is None:
            return full_training
        tokens = sum(len(batch.token_ids) for batch in batches)
        rows = sum(len(batch.predictors) for batch in batches)
        adapter_width = sum(sum(architecture.projections[name]) for name in self.lora.targets)
        adapter_weights = adapter_width * self.lora.rank
        frozen_gradients = self.work(tokens, 0, rows)
        return full_training - frozen_gradients + 6 * architecture.layers * tokens * adapter_weights

    def batch_counts(self, min_count: int) -> list[int]:
        """Return the numbers of micro-batches with which packing tries to balance the work, ascending.

        They are multiples of `dp`; with interleaved stages, each data-parallel rank gets a multiple
        of `pp` micro-batches. The list is empty if a single rank does all the work.

        Args:
            min_count: number of micro-batches that are needed at least.
        """
        if not self.is_distributed:
            return []
        step = self.pp if self.vpp > 1 else 1
        min_per_rank = -(-min_count // (self.dp * step)) * step
        max_per_rank = min_per_rank
        if self.pp > 1:
            max_per_rank = max(min_per_rank, _MAX_BATCHES_PER_PIPELINE_RANK * self.pp)
        return [self.dp * per_rank for per_rank in range(min_per_rank, max_per_rank + 1, step)]

    def makespan(self, loads: Sequence[float]) -> float:
        """Return the time of a pass over micro-batches on all ranks, in units of work.

        It is the time of the rank that finishes last. In a pipeline, each stage also waits until
        the first micro-batch has reached it and until the last one has left the later stages.

        Args:
            loads: work of each micro-batch.
        """
        times = []
        for indices in balance_work(loads, self.dp):
            rank_loads = [loads[i] for i in indices]
            waiting = (self.pp - 1) * max(rank_loads, default=0.0)
            times.append((sum(rank_loads) + waiting) / self.pp)
        return max(times)


def balance_work(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign micro-batches to ranks, the most expensive first, each to the rank with least work.

    The largest load is at most 4/3 of that of the best assignment (Graham 1969). Among equal loads
    the lowest rank is chosen, so that every process computes the same assignment.

    Returns:
        For each rank, the indices of its micro-batches in ascending order; a rank may have none.
    """
    loads = [0.0] * ranks
    assignment: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[rank] += costs[i]
        assignment[rank].append(i)
    return [sorted(indices) for indices in assignment]
