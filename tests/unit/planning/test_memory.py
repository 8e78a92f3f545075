"""The memory formulas match published parameter counts and counts by hand."""

from pathlib import Path

import pytest

from mcore_mas.config.policy import LoraConfig
from mcore_mas.planning import jobs
from mcore_mas.planning.memory import (
    TrainerMemory,
    TrainerSettings,
    activation_bytes,
    checkpoint_bytes,
    combine_on_rank,
    count_adapter_parameters,
    count_parameters,
    count_rank_parameters,
    engine_weight_bytes,
    estimate_trainer_memory,
    kv_bytes_per_token,
)
from rollout.base.errors import ModelError
from rollout.models.architecture import Architecture, parse_architecture
from rollout.models.layout import ParallelLayout, Recompute
from rollout.models.published_shapes import planned_architecture, published_shapes

# Exact parameter counts of the model cards on Hugging Face
STATED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
}
TINY = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
# q 8x8, k and v 4x8, o 8x8, biases of q, k and v, three MLP matrices 16x8, two norms of 8
TINY_LAYER = 64 + 32 + 32 + 64 + (8 + 4 + 4) + 3 * 128 + 16
TINY_EMBEDDING = 10 * 8
TINY_PARAMETERS = TINY_EMBEDDING + 2 * TINY_LAYER + 8
TOKENS = 100


def tiny(**changes: object) -> Architecture:
    return parse_architecture(TINY | changes, "test")


def tiny_memory(*, dp: int = 1, **changes: object) -> TrainerMemory:
    """Return the memory of a trainer of the tiny model with some settings changed."""
    settings: dict[str, object] = {
        "bf16": True,
        "distributed_optimizer": True,
        "recompute": "full",
        "microbatch_tokens": TOKENS,
    }
    return estimate_trainer_memory(
        tiny(), ParallelLayout(dp=dp), TrainerSettings(**settings | changes)
    )


@pytest.mark.parametrize("name", STATED)
def test_published_models_have_the_parameters_of_their_cards(name: str) -> None:
    assert count_parameters(planned_architecture(f"models/{name}")) == STATED[name]


def test_every_published_model_is_counted() -> None:
    assert STATED.keys() == published_shapes()["models"].keys()
    assert planned_architecture("models/AReaL-boba-2-8B") == planned_architecture(
        "elsewhere/Qwen3-8B-Base"
    )
    # The shape of this model is not known for certain.
    assert published_shapes()["assumed"] == ["AReaL-boba-2-32B"]


def test_an_unknown_model_is_refused() -> None:
    message = (
        "models/Mine: no config.json here, and no published model of this name; published models"
    )
    with pytest.raises(ModelError, match=message):
        planned_architecture("models/Mine")


def test_parameters_of_a_whole_model() -> None:
    final_norm = 8
    layers = 2 * TINY_LAYER
    assert count_parameters(tiny()) == TINY_EMBEDDING + layers + final_norm
    untied = tiny(tie_word_embeddings=False)
    assert count_parameters(untied) == 2 * TINY_EMBEDDING + layers + final_norm
    value_head = 8
    critic = count_parameters(tiny(), value_head=True)
    assert critic == TINY_EMBEDDING + layers + final_norm + value_head


def test_tensor_parallelism_halves_all_but_the_norms() -> None:
    # A second key-value head adds 4 rows to k and v, with biases; a layer has two norms of 8.
    layer_without_norms = TINY_LAYER - 16 + 2 * (4 * 8 + 4)
    norms = 2 * 16 + 8
    halved = (TINY_EMBEDDING + 2 * layer_without_norms) // 2
    two_kv_heads = tiny(num_key_value_heads=2)
    assert count_rank_parameters(two_kv_heads, ParallelLayout(tp=2)) == halved + norms


def test_the_last_pipeline_stage_has_a_copy_of_the_tied_embedding() -> None:
    last_stage = TINY_LAYER + 8 + TINY_EMBEDDING
    assert count_rank_parameters(tiny(), ParallelLayout(pp=2)) == last_stage


def test_parameters_of_adapters() -> None:
    lora = LoraConfig(rank=4, alpha=8)
    # rows + inputs of q, k, v, o, gate, up, down, for two layers of rank 4
    whole = (8 + 8) + (4 + 8) + (4 + 8) + (8 + 8) + (16 + 8) + (16 + 8) + (8 + 16)
    assert count_adapter_parameters(tiny(), ParallelLayout(), lora) == 2 * 4 * whole
    # With tp 2 the rows of q, k, v, gate and up are halved, and the inputs of o and down.
    halved = (4 + 8) + (2 + 8) + (2 + 8) + (8 + 4) + (8 + 8) + (8 + 8) + (8 + 8)
    assert count_adapter_parameters(tiny(), ParallelLayout(tp=2), lora) == 2 * 4 * halved


def test_weights_gradients_and_optimizer_state() -> None:
    n = TINY_PARAMETERS
    one_rank = tiny_memory()
    assert (one_rank.weights, one_rank.gradients, one_rank.optimizer) == (2 * n, 4 * n, 12 * n)
    assert tiny_memory(dp=4).optimizer == 3 * n
    assert tiny_memory(dp=4, distributed_optimizer=False).optimizer == 12 * n

    float32 = tiny_memory(bf16=False)
    assert (float32.weights, float32.gradients, float32.optimizer) == (4 * n, 4 * n, 8 * n)


def test_moments_in_host_memory_leave_those_of_the_largest_weight_on_the_gpu() -> None:
    n = TINY_PARAMETERS
    memory = tiny_memory(host_moments=True)
    gate_and_up = 2 * 16 * 8
    assert memory.host_moments == 8 * n
    assert memory.optimizer == 4 * n + 8 * gate_and_up


def test_the_experts_of_a_layer_are_one_weight_whose_moments_stay_on_the_gpu() -> None:
    mixture = tiny(
        model_type="qwen3_moe",
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
    )
    settings = TrainerSettings(
        bf16=True,
        distributed_optimizer=False,
        recompute="full",
        microbatch_tokens=TOKENS,
        host_moments=True,
    )
    for ep, rank_experts in ((1, 4), (2, 2)):
        layout = ParallelLayout(dp=ep, ep=ep)
        memory = estimate_trainer_memory(mixture, layout, settings)
        gate_and_up = rank_experts * 2 * 12 * 8  # a single dense one has 2 * 16 * 8
        assert memory.optimizer == 4 * count_rank_parameters(mixture, layout) + 8 * gate_and_up


def test_gradients_of_several_agents_are_summed_on_the_host_or_in_parts_on_the_gpus() -> None:
    n = TINY_PARAMETERS
    one_agent = tiny_memory()
    one_rank = tiny_memory(agents=3)
    assert (one_rank.host_gradient_sum, one_rank.gradient_sum) == (4 * n, 0)
    assert one_rank.peak == one_agent.peak

    two_ranks = tiny_memory(dp=2, agents=3)
    assert (two_ranks.host_gradient_sum, two_ranks.gradient_sum) == (0, 2 * n)
    half_of_the_optimizer_state = 6 * n
    assert two_ranks.peak == one_agent.peak - half_of_the_optimizer_state + 2 * n


def test_activations() -> None:
    norms = 2 * 2 * 8  # input and output of both
    attention = 2 * (8 + 4) + 4 + 8  # q and k twice, v and the output once
    mlp = 3 * 16
    layer = norms + attention + mlp
    final_norm = 2 * 2 * 8
    layer_inputs = 2 * 8

    def activations(**changes: object) -> float:
        return tiny_memory(**changes).activations

    assert activations() == 2 * TOKENS * (layer_inputs + layer + final_norm)
    assert activations(recompute="none") == 2 * TOKENS * (2 * layer + final_norm)
    # Selective recomputation drops the norms' outputs and the product of gate and up.
    selective = layer - 2 * 8 - 16
    assert activations(recompute="selective") == 2 * TOKENS * (2 * selective + final_norm)
    # Unfused SwiGLU saves the result of SiLU. Unfused attention saves q, k, v and the output in
    # float32, and the output in bfloat16.
    unfused = norms + 2 * (8 + 4 + 4 + 8) + 8 + mlp + 16
    assert activations(recompute="none", fused=False) == 2 * TOKENS * (2 * unfused + final_norm)
    float32 = 2 * (layer + 16) + 2 * 8
    assert activations(recompute="none", fused=False, bf16=False) == 4 * TOKENS * float32


def test_activations_of_transformer_engine() -> None:
    """A norm inside a linear layer saves its output also with selective recomputation."""
    norms = 2 * 2 * 8
    attention = 2 * (8 + 4) + 4 + 8
    final_norm = 2 * 2 * 8

    def activations(**changes: object) -> float:
        return tiny_memory(layers="te", **changes).activations

    none = norms + attention + 3 * 16
    assert activations(recompute="none") == 2 * TOKENS * (2 * none + final_norm)
    selective = norms + attention + 2 * 16
    assert activations(recompute="selective") == 2 * TOKENS * (2 * selective + final_norm)

    # In FP8, products save one byte for each element of their inputs and two for each weight.
    # The output of attention is saved in bfloat16 too.
    norms_in_fp8 = 2 * (8 + 8 / 2)
    in_fp8 = norms_in_fp8 + attention + 8 / 2 + 2 * 16 + 16 / 2
    weights = 2 * 2 * TINY_LAYER
    assert activations(recompute="none", fp8=True) == (
        2 * TOKENS * (2 * in_fp8 + final_norm) + weights
    )
    inputs_of_layers = 2 * 8
    assert activations(recompute="full", fp8=True) == (
        2 * TOKENS * (inputs_of_layers + in_fp8 + final_norm) + weights / 2
    )


def test_activations_of_experts_of_transformer_engine() -> None:
    mixture = tiny(
        model_type="qwen3_moe",
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
    )

    def activations(recompute: Recompute) -> float:
        settings = TrainerSettings(
            bf16=True,
            distributed_optimizer=False,
            recompute=recompute,
            microbatch_tokens=TOKENS,
            layers="te",
        )
        return activation_bytes(mixture, ParallelLayout(), settings)

    norms = 2 * 2 * 8
    attention = 2 * (8 + 4) + 4 + 8 + (8 + 4)  # copies of queries and keys for their norms
    # Two experts with gate, up, the result of SiLU, the product, the scaled product and the input
    experts = 2 * (5 * 12 + 8) + 8
    final_norm = 2 * 2 * 8
    assert activations("none") == 2 * TOKENS * (2 * (norms + attention + experts) + final_norm)
    # The norm before the experts is computed again, and so is all but gate and up.
    fewer = 8 + 2 * 3 * 12
    assert activations("selective") == (
        2 * TOKENS * (2 * (norms + attention + experts - fewer) + final_norm)
    )


def test_the_peak_of_an_update() -> None:
    policy = tiny_memory()
    chunk_and_gradient = (4 + 2) * 2**28
    hidden_states = 2 * 2 * TOKENS * 8
    assert policy.logits == chunk_and_gradient + 2 * TINY_EMBEDDING + hidden_states
    assert policy.activation_gradients == 2 * TOKENS * (3 * 16 + 4 * 8)
    assert policy.persistent == 18 * TINY_PARAMETERS
    assert policy.peak == policy.persistent + policy.activations + policy.logits

    critic = tiny_memory(value_head=True)
    assert critic.logits == 0
    assert critic.peak == critic.persistent + critic.activations + critic.activation_gradients


def test_trainers_that_share_a_rank_compute_one_at_a_time() -> None:
    policy = tiny_memory()
    critic = tiny_memory(value_head=True)
    both = combine_on_rank([policy, critic])
    assert both.persistent == policy.persistent + critic.persistent
    assert both.peak == both.persistent + policy.activations + policy.logits


def test_checkpoints_engines_and_kv_cache() -> None:
    settings = TrainerSettings(
        bf16=True,
        distributed_optimizer=True,
        recompute="full",
        microbatch_tokens=TOKENS,
    )
    assert checkpoint_bytes(tiny(), [settings]) == 12 * TINY_PARAMETERS
    assert engine_weight_bytes(tiny(), tp=1) == 2 * TINY_PARAMETERS
    # Keys and values, two bytes, two layers, one head of 4, which is on both GPUs.
    assert kv_bytes_per_token(tiny(), tp=1) == 2 * 2 * 2 * 4
    assert kv_bytes_per_token(tiny(), tp=2) == 2 * 2 * 2 * 4
    # Qwen3-8B: 36 layers with eight heads of 128
    assert kv_bytes_per_token(planned_architecture("Qwen3-8B"), tp=1) == 147_456


def test_the_page_counts_a_team_of_two_large_policies() -> None:
    """docs/plan.md, on what limits a large team: 10 M tokens a policy, 5 GB/s."""
    page = (Path(__file__).parents[3] / "docs" / "plan.md").read_text(encoding="utf-8")
    model = planned_architecture("Qwen2.5-32B")
    settings = TrainerSettings(
        bf16=True, distributed_optimizer=True, recompute="full", microbatch_tokens=16384
    )
    checkpoints = 2 * checkpoint_bytes(model, [settings]) / 1e9
    assert f"| {checkpoints:.0f} GB: {checkpoints / 5:.0f} s at 5 GB/s |" in page
    samples = jobs.TOKEN_BYTES * 10e6 / 1e9
    assert f"| {samples:.1f} GB a node |" in page
    assert f"| {engine_weight_bytes(model, tp=1) / 1e9:.0f} GB a policy |" in page
