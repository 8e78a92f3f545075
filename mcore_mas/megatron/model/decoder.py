"""The GPT model on packed sequences, whose head gives log-probabilities and entropies, or a critic's values.

On a CPU most of an update is the matrix products of linear layers. Where a weight is one factor, oneDNN multiplies
faster than the library behind `torch.matmul`: forward, and backward to a layer's inputs. The gradient of a weight is
added to Megatron's buffer as it is made, instead of made and then added.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_mas.megatron.batch import Microbatch
from mcore_mas.megatron.device import rank_device, use_triton
from mcore_mas.megatron.main_grad import add_product, head_weight_grad, placeholder_grad
from mcore_mas.megatron.model.attention import TreeRotary
from mcore_mas.megatron.model.cpu_ops import Gated, Normed, exponential
from mcore_mas.megatron.model.layer_ops import KernelHead, KernelNorm, swiglu
from mcore_mas.megatron.model.layout import PackedTrees
from rollout.models.exact import row_product

LAYER = re.compile(r"(?<=layers\.)\d+")  # the layer's number in a parameter's name
# and the expert's, or those of the first and the last of a stack
EXPERT = re.compile(r"(?<=experts\.linear_fc[12]\.weight)\d+(-\d+)?")


def renumbered(number: re.Pattern[str], name: str, shift: int) -> str:
    """A parameter's name with `LAYER` or `EXPERT` counted from elsewhere."""
    return number.sub(
        lambda found: re.sub(r"\d+", lambda digits: str(int(digits[0]) + shift), found[0]), name
    )


class PackedGPTModel(GPTModel):
    """A `GPTModel` on packed trees that puts out what is asked of N rows instead of logits for T tokens.

    The head is most of the work of a small model and most of the memory of any, and prompts need none of it.
    """

    _asked: Microbatch  # this rank's tokens and rows
    _tokens: Tensor  # [n] those that leave the last layer, where it `_narrows`, in its forward pass
    _places: Tensor  # [N] where the rows are among them

    def __init__(self, *args: Any, value_head: bool, vocab: int, **kwargs: Any) -> None:
        """As `GPTModel`; with `value_head`, a `ValueHead` in place of the output layer.

        Args:
            vocab: tokens of the vocabulary without padding.
        """
        super().__init__(*args, **kwargs)
        self._vocab = vocab
        # GPTModel builds its own rotary module and output layer, without a choice; both are replaced.
        self.rotary_pos_emb = TreeRotary(
            kv_channels=self.config.kv_channels,
            rotary_percent=1.0,
            rotary_base=kwargs["rotary_base"],
            use_cpu_initialization=self.config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
        )
        if self.post_process and value_head:
            self.output_layer: Any = ValueHead(self.config)
        elif self.post_process:
            self.output_layer = OutputWeight(self.output_layer.weight)

        last_layer = self.decoder.layers[-1]
        # With sequence parallelism other ranks need all tokens, and a recorded routing has them all.
        needs_all_tokens = self.config.sequence_parallel or last_layer.is_moe_layer
        self._narrows = self.post_process and rank_device().type == "cpu" and not needs_all_tokens
        if self._narrows:
            last_layer.self_attn_bda = _NarrowedResidual(last_layer.self_attn_bda, self._narrow)
            last_layer.self_attention.core_attention.register_forward_hook(
                self._narrow_attention, with_kwargs=True
            )

    def ask(self, asked: Microbatch, layout: PackedTrees) -> None:
        """Say what the next forward pass is asked of this rank's tokens.

        On a CPU only those that predict something go on behind the last layer's attention: nothing attends to them.
        """
        self._asked, self._places = asked, asked.predictors
        if self._narrows:
            layout.asked, self._places = asked.predictors.unique(return_inverse=True)

    def _narrow_attention(
        self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        """Forward hook of the last layer's attention: keep the outputs of the tokens that predict something."""
        self._tokens = kwargs["packed_seq_params"].asked  # also when the layer is recomputed
        return self._narrow(output)

    def _narrow(self, x: Tensor) -> Tensor:
        """Select the tokens that predict something, [n, ...] of [T, ...]."""
        return x.index_select(0, self._tokens)

    def numbered_parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by name, with layers and experts counted from the first of the whole model."""
        return {self.numbered(name): parameter for name, parameter in self.named_parameters()}

    def numbered(self, name: str) -> str:
        """A parameter's or module's name with layers and experts counted from the first of the whole model."""
        layer = int(self.decoder.layers[0].layer_number) - 1
        ranks = parallel_state.get_expert_model_parallel_world_size()
        expert = (
            parallel_state.get_expert_model_parallel_rank()
            * (self.config.num_moe_experts or 0)
            // ranks
        )
        return renumbered(EXPERT, renumbered(LAYER, name, layer), expert)

    def _postprocess(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Log-probabilities and entropies or values, each [N] float32; before the last stage what the next is sent."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # the head makes the gradient whole on every rank: each takes its part of it
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        rows = hidden_states[self._places, 0]
        if isinstance(self.output_layer, ValueHead):
            return (self.output_layer(rows),)
        embeds = self.share_embeddings_and_output_weights and self.pre_process
        weight = self.shared_embedding_or_output_weight() if embeds else self.output_layer()
        # of a weight that embeds here too, that use will pass on the gradient
        how = {"embeds": embeds, "exact": self.config.deterministic_mode}
        return logprobs_and_entropy(
            rows, weight, self._asked.labels, self._asked.temperatures, self._vocab, **how
        )


class _NarrowedResidual:
    """The bias-dropout-add of a layer whose attention outputs fewer tokens than the residual has."""

    def __init__(
        self, bias_dropout_add: Callable[..., Any], narrow: Callable[[Tensor], Tensor]
    ) -> None:
        self._bias_dropout_add = bias_dropout_add
        self._narrow = narrow

    def __call__(self, training: bool, fused: bool) -> Callable[[Any, Tensor, float], Tensor]:
        """Return Megatron's function of (attention output and bias, residual, dropout probability)."""
        add = self._bias_dropout_add(training, fused)

        def narrowed_add(output_and_bias: Any, residual: Tensor, dropout: float) -> Tensor:
            added: Tensor = add(output_and_bias, self._narrow(residual), dropout)
            return added

        return narrowed_add


class OutputWeight(torch.nn.Module):
    """Weight of the output layer; a call returns it.

    The weight is read through a call, so that the forward hooks of the distributed optimizer first wait until all of it
    has been gathered.
    """

    def __init__(self, weight: torch.nn.Parameter | None) -> None:
        """Take over the weight of Megatron's output layer; None where it is tied to the embedding of this stage."""
        super().__init__()
        self.register_parameter("weight", weight)

    def forward(self) -> Tensor:
        """Return the weight, [padded vocabulary / tp, hidden]."""
        return self.weight  # type: ignore[return-value]  # registered as a parameter


class ValueHead(torch.nn.Module):
    """One number per position, the same weights on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        # small and seeded: values start near 0, whatever the width, and equal on all ranks
        drawn = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(0))
        self.value = torch.nn.Parameter((drawn / (config.hidden_size + 1)).to(config.params_dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [N] in float32 of hidden states [N, hidden]."""
        return (hidden @ self.value.t())[:, 0].float()


# Of the float32 logits that exist at a time. Computing with them takes 1.5 times as much on a GPU, where every chunk
# also reads the whole weight three times, and its gradient twice; on the CPU a chunk is what stays in a core's cache,
# if that is enough rows for the products, and as many as fit are kept for the backward pass
_CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
_CACHED_BYTES, _CACHED_ROWS = 4 << 20, 128


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    vocab: int,
    *,
    embeds: bool,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `labels`, and the entropy, of softmax(hidden · weightᵀ / temperature), in float32.

    Both carry the gradient; an entropy that no loss uses costs nothing in the backward pass. Logits are made in chunks
    of rows, and but for the last ones made again in the backward pass, so that all of them never exist.

    Args:
        hidden: [N, hidden] the same on every tensor-parallel rank, as its gradient will be.
        weight: [padded vocabulary / tp, hidden], this rank's rows.
        labels: [N] global token ids.
        temperatures: [N], all > 0.
        vocab: tokens of the vocabulary; padding rows beyond it get no probability.
        embeds: whether the weight embeds this rank's tokens as well.
        exact: a row's logits have the same bits among any rows.

    Returns:
        log-probabilities [N], natural; entropies [N] in nats.
    """
    first = len(weight) * parallel_state.get_tensor_model_parallel_rank()
    columns = max(0, min(len(weight), vocab - first))
    if use_triton(weight.device):
        parts = list(_chunks(len(labels), weight))
        logprobs, entropy = KernelHead.apply(
            hidden, weight, labels - first, temperatures, columns, embeds, parts
        )
    else:
        logprobs, entropy = _Head.apply(
            hidden, weight, labels - first, temperatures, columns, embeds, exact
        )
    return logprobs, entropy


class _Head(torch.autograd.Function):
    """Labels count from this rank's first column; one outside its columns is another rank's."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        columns: int,
        embeds: bool,
        exact: bool,
    ) -> tuple[Tensor, Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        peak, z, expected, label = torch.zeros(4, len(labels), device=hidden.device)
        parts = list(_chunks(len(labels), weight))
        rows = max((part.stop - part.start for part in parts), default=1)
        # of the chunks' exponentials as many as may exist at a time
        kept: deque[Tensor] = deque(maxlen=max(1, _chunk_bytes(weight) // (4 * len(weight) * rows)))
        for part in parts:
            if len(kept) == kept.maxlen:
                kept.popleft()  # before the next are made
            shifted = _logits(hidden[part], weight, temperatures[part], columns, exact)
            peak[part] = shifted.amax(dim=-1)
            dist.all_reduce(peak[part], op=dist.ReduceOp.MAX, group=group)
            kept.append(exponential(shifted.sub_(peak[part, None]), exact))
            mine, column = _mine(labels[part], len(weight))
            said = torch.where(mine, shifted.gather(1, column)[:, 0], 0.0)
            sums = torch.stack([kept[-1].sum(-1), shifted.mul_(kept[-1]).sum(-1), said])
            del shifted
            dist.all_reduce(sums, group=group)
            z[part], expected[part], label[part] = sums[0], sums[1] / sums[0], sums[2]
        log_z = z.log()
        # H = log Z − E[z]
        entropy = log_z - expected
        ctx.set_materialize_grads(False)
        ctx.columns, ctx.embeds, ctx.exact, ctx.kept = columns, embeds, exact, kept
        ctx.total = getattr(weight, "main_grad", None)
        ctx.save_for_backward(hidden, weight, labels, temperatures, peak, z, entropy)
        return label - log_z, entropy

    @staticmethod
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, temperatures, peak, z, entropy = ctx.saved_tensors
        of_hidden, total = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:
            total = (
                torch.zeros(weight.shape, device=weight.device) if ctx.total is None else ctx.total
            )
        of_label: Any
        of_h: Any
        of_label, of_h = (0.0 if x is None else x / temperatures for x in (of_logprobs, of_entropy))
        # d log p_l/dz_j = [j = l] − p_j; dH/dz_j = −p_j log p_j − p_j H
        by_p = -(of_label + of_h * entropy)
        parts = list(_chunks(len(labels), weight))
        for number, part in enumerate(parts, len(ctx.kept) - len(parts)):
            if number >= 0:
                gradient = ctx.kept.popleft()
            else:
                gradient = _logits(hidden[part], weight, temperatures[part], ctx.columns, ctx.exact)
                gradient = exponential(gradient.sub_(peak[part, None]), ctx.exact)
            if of_entropy is None:
                gradient.mul_((by_p[part] / z[part])[:, None])
            else:
                uncertain = torch.special.entr(gradient.div_(z[part, None]))
                gradient.mul_(by_p[part, None]).add_(uncertain.mul_(of_h[part, None]))
                del uncertain
            if of_logprobs is not None:
                mine, column = _mine(labels[part], len(weight))
                gradient.scatter_add_(1, column, (of_label[part] * mine)[:, None])
            of_logits = gradient.to(weight.dtype)
            of_hidden[part] = product(of_logits, weight.t())
            if total is not None:
                add_product(total, of_logits.t(), hidden[part])
            del gradient, of_logits  # before the next are made
        # every rank has the part of its own columns
        dist.all_reduce(of_hidden, group=parallel_state.get_tensor_model_parallel_group())
        return of_hidden, head_weight_grad(weight, total, ctx), None, None, None, None, None


def _chunks(rows: int, weight: Tensor) -> Iterator[slice]:
    row = 4 * len(weight)
    size = max(1, _chunk_bytes(weight) // row)
    if weight.device.type == "cpu":
        size = min(size, max(_CACHED_ROWS, _CACHED_BYTES // row))
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))


def _chunk_bytes(weight: Tensor) -> int:
    return _CHUNK_BYTES["cpu" if weight.device.type == "cpu" else "cuda"]


def _logits(
    hidden: Tensor, weight: Tensor, temperatures: Tensor, columns: int, exact: bool
) -> Tensor:
    """[rows, columns of this rank] float32, after temperature."""
    logits = (row_product if exact else product)(hidden, weight).float()
    if logits.device.type != "cpu" or (temperatures != 1).any():
        logits.div_(temperatures[:, None])
    logits[:, columns:] = -1e30
    return logits


def _mine(labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Whether each label is in this rank's columns, and its column [rows, 1], or any."""
    return (labels >= 0) & (labels < width), labels.clamp(0, width - 1)[:, None]


# Inductor's linear layer, where torch is built with oneDNN; its relative error is 3e-7 to 6e-7, of sums however long
_one_dnn: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
# multiplications from which on it pays: oneDNN makes a kernel for every new shape, in about 0.6 ms (measured, an update
# whose micro-batches all differ in length: 384 wide, 7 % less CPU time for all products by oneDNN; 64 wide, 26 % more)
_WORTH_A_KERNEL = 1 << 26


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weightᵀ [..., rows] of x [..., inputs] and a weight [rows, inputs]; carries no gradient."""
    suits = (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() * len(weight) >= _WORTH_A_KERNEL
    )
    if suits and _one_dnn is not None:
        return _one_dnn(x, weight, None, "none", [], "")
    return x @ weight.t()


class ColumnLinear(ColumnParallelLinear):
    """Megatron's linear layer whose rows are cut across ranks."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _linear(
            super()._forward_impl, input, weight, exact=self.config.deterministic_mode, **kwargs
        )


class RowLinear(RowParallelLinear):
    """Megatron's linear layer whose inputs are cut across ranks."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _linear(
            super()._forward_impl, input, weight, exact=self.config.deterministic_mode, **kwargs
        )


def _linear(
    megatron: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None,
    exact: bool,
    **how: Any,
) -> Tensor:
    """The product with a weight that is trained on the CPU; `megatron`'s own where ranks exchange along with it."""
    frozen = not weight.requires_grad and not exact
    if x.device.type != "cpu" or frozen or how["allreduce_dgrad"] or how["sequence_parallel"]:
        return megatron(x, weight, bias=bias, **how)
    out: Tensor = _Linear.apply(x, weight, exact)
    return out if bias is None else out + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, exact: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = getattr(weight, "main_grad", None)
        return (row_product if exact else product)(x, weight)

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_out = of_out.contiguous()
        of_x = product(of_out, weight.t())
        if not ctx.needs_input_grad[1]:
            return of_x, None, None
        rows, inputs = of_out.flatten(0, -2), x.flatten(0, -2)
        if ctx.total is None:
            return of_x, rows.t() @ inputs, None
        add_product(ctx.total, rows.t(), inputs)
        return of_x, placeholder_grad(weight), None


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm whose weight Megatron knows to reduce under sequence parallelism."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps, self.exact = eps, config.deterministic_mode

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        out: Tensor
        if use_triton(x.device):
            out = KernelNorm.apply(x, self.weight, self.eps)
        elif x.device.type == "cpu" and not self.exact:
            out = Normed.apply(x, self.weight, self.eps)
        else:
            out = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return out


class GatedMLP(MLP):
    """Megatron's MLP as all these models have it: two halves, SwiGLU, no biases."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        """(output [..., hidden], None) of hidden states of that shape."""
        wide, _bias = self.linear_fc1(hidden_states)
        return multiply_gated(self.config, wide, None, self.linear_fc2)


def multiply_gated(
    config: TransformerConfig, wide: Tensor, scale: Tensor | None, linear: Callable[[Tensor], Any]
) -> Any:
    """(output, bias) of `linear` for what is `gated` [..., f] of `wide` [..., 2 f].

    With selective recomputation SwiGLU's product is freed once it is multiplied, and made again in the backward pass.
    """
    if config.recompute_granularity != "selective":
        return linear(gated(wide, scale))
    product = CheckpointWithoutOutput()
    out = linear(product.checkpoint(gated, wide, scale))
    product.discard_output_and_register_recompute(out[0])
    return out


def gated(wide: Tensor, scale: Tensor | None = None) -> Tensor:
    """silu(gate) · up [..., f] of `wide` [..., 2 f], gate first; times the `scale` [...] of its rows, if given."""
    out: Tensor
    if use_triton(wide.device):
        out = swiglu(wide, scale)
        return out
    out = Gated.apply(wide)
    return out if scale is None else (out * scale.unsqueeze(-1)).to(out.dtype)
