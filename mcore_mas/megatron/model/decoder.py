"""Megatron's GPT model on packed prefix trees, with a head of a policy or a critic."""

from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn import Parameter

from mcore_mas.megatron.batch import Microbatch
from mcore_mas.megatron.device import rank_device
from mcore_mas.megatron.model.head import OutputWeight, ValueHead, logprobs_and_entropy
from mcore_mas.megatron.model.head_ops import RowGradients
from mcore_mas.megatron.model.layout import PackedTrees
from mcore_mas.megatron.model.parameter_names import EXPERT_NUMBER, LAYER_NUMBER, renumber
from mcore_mas.megatron.model.rotary import TreeRotary


class PackedGPTModel(GPTModel):
    """`GPTModel` on packed prefix trees that returns results for the trained rows only.

    The results are log-probabilities and entropies, or values, of N rows, instead of logits of all
    T tokens. The head is most of the work of a small model and most of the memory of any model, and
    prompts do not need it.
    """

    _microbatch: Microbatch  # of the next forward pass: this rank's tokens and rows
    _row_gradients: RowGradients | None  # of that pass; see `logprobs_and_entropy`
    _row_positions: Tensor  # [N] position of each row's token among the outputs of the last layer
    _predicting_tokens: Tensor  # [n] tokens that leave the last layer, if not all of them do

    def __init__(self, *args: Any, value_head: bool, vocab: int, **kwargs: Any) -> None:
        """Build the stage as `GPTModel` does.

        Args:
            value_head: put a `ValueHead` in the place of the output layer.
            vocab: number of tokens of the vocabulary, without padding.
            args, kwargs: arguments of `GPTModel`.
        """
        super().__init__(*args, **kwargs)
        self._vocab = vocab

        # GPTModel always builds its own rotary module and output layer, so both are replaced
        # afterwards.
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

        # On a CPU, tokens that predict nothing are dropped after the attention of the last layer.
        # They are kept with sequence parallelism, because other ranks need all tokens; with
        # experts, because the recorded routing covers all tokens; and in FP8, because the number
        # of tokens must stay a multiple of `FP8_MULTIPLES`.
        last_layer = self.decoder.layers[-1]
        needs_all_tokens = (
            self.config.sequence_parallel or last_layer.is_moe_layer or bool(self.config.fp8)
        )
        on_cpu = rank_device().type == "cpu"
        self._narrows_last_layer = self.post_process and on_cpu and not needs_all_tokens
        if self._narrows_last_layer:
            last_layer.self_attn_bda = _NarrowedResidual(last_layer.self_attn_bda, self._narrow)
            last_layer.self_attention.core_attention.register_forward_hook(
                self._narrow_attention, with_kwargs=True
            )

    def prepare(
        self,
        microbatch: Microbatch,
        layout: PackedTrees,
        row_gradients: RowGradients | None = None,
    ) -> None:
        """Set the rows that the next forward pass returns; call it before each forward pass.

        Where the last layer drops tokens that predict nothing, `layout.predictors` is set as well.

        Args:
            microbatch: this rank's tokens and rows.
            layout: layout of the same micro-batch; handed to the forward pass as `packed_seq_params`.
            row_gradients: see `logprobs_and_entropy`.
        """
        self._microbatch = microbatch
        self._row_gradients = row_gradients
        self._row_positions = microbatch.predictors
        if self._narrows_last_layer:
            # Several rows may have the same predictor, whose output is computed once.
            predictors, positions = microbatch.predictors.unique(return_inverse=True)
            layout.predictors = predictors
            self._row_positions = positions

    def _narrow_attention(
        self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        """Select the tokens that predict something; a forward hook of the last layer's attention."""
        # The tokens come with the call, because a recomputed layer may follow the forward pass of
        # another micro-batch.
        self._predicting_tokens = kwargs["packed_seq_params"].predictors
        return self._narrow(output)

    def _narrow(self, x: Tensor) -> Tensor:
        """Select the tokens that predict something, [n, ...] of [T, ...]."""
        return x.index_select(0, self._predicting_tokens)

    def numbered_parameters(self) -> dict[str, Parameter]:
        """Return this rank's parameters by name, with layers and experts numbered over the whole model."""
        return {self.numbered(name): parameter for name, parameter in self.named_parameters()}

    def numbered(self, name: str) -> str:
        """Return a parameter's or module's name, with layer and expert numbered over the whole model."""
        first_layer = int(self.decoder.layers[0].layer_number) - 1
        expert_rank = parallel_state.get_expert_model_parallel_rank()
        expert_ranks = parallel_state.get_expert_model_parallel_world_size()
        first_expert = expert_rank * (self.config.num_moe_experts or 0) // expert_ranks

        name = renumber(LAYER_NUMBER, name, first_layer)
        return renumber(EXPERT_NUMBER, name, first_expert)

    def _postprocess(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Return this stage's output.

        Returns:
            On the last stage (log-probabilities, entropies), or (values,) of a critic, each [N]
            float32. On the others the hidden states that are sent to the next stage.
        """
        if not self.post_process:
            return hidden_states

        if self.config.sequence_parallel:
            # The head's backward pass returns the complete gradient on every rank. The backward
            # pass of this gather therefore takes the rank's part, and does not sum over ranks.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        rows = hidden_states[self._row_positions, 0]
        if isinstance(self.output_layer, ValueHead):
            return (self.output_layer(rows),)

        # On a single pipeline stage, the embedding may have the same weight.
        is_embedding = self.share_embeddings_and_output_weights and self.pre_process
        weight = self.shared_embedding_or_output_weight() if is_embedding else self.output_layer()
        return logprobs_and_entropy(
            rows,
            weight,
            self._microbatch.labels,
            self._microbatch.temperatures,
            self._vocab,
            is_embedding=is_embedding,
            exact=self.config.deterministic_mode,
            masks=self._microbatch.masks,
            mask_rows=self._microbatch.mask_rows,
            row_gradients=self._row_gradients,
        )


class _NarrowedResidual:
    """Bias-dropout-add of a layer whose attention outputs fewer tokens than the residual has."""

    def __init__(
        self, bias_dropout_add: Callable[..., Any], narrow: Callable[[Tensor], Tensor]
    ) -> None:
        self._bias_dropout_add = bias_dropout_add
        self._narrow = narrow

    def __call__(self, training: bool, fused: bool) -> Callable[[Any, Tensor, float], Tensor]:
        """Return a function of (attention output and bias, residual, dropout probability)."""
        add = self._bias_dropout_add(training, fused)

        def narrowed_add(output_and_bias: Any, residual: Tensor, dropout: float) -> Tensor:
            added: Tensor = add(output_and_bias, self._narrow(residual), dropout)
            return added

        return narrowed_add
