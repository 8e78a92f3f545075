"""Memory of a run in each phase matches sums by hand."""

from collections.abc import Callable

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.planning.estimate import (
    engine_weights,
    estimate_disk,
    estimate_host_memory,
    estimate_peak_memory,
    estimate_trainers,
    load_architectures,
)
from mcore_mas.planning.gpus import GPUS
from mcore_mas.planning.memory import count_parameters

H100 = GPUS["H100"]
USABLE = 0.92 * 80e9
# CUDA context and graphs of an SGLang server, and activations of 8,192 tokens of Llama-3.2-3B: three
# hidden states, and gate, up projection and their product
SERVER = 1e9 + 0.9e9 + 2 * 8192 * (3 * 3072 + 3 * 8192)
IN_TURN = ["engine.sleep=true", "policies.shared.offload=true"]


def config(experiment: str, *overrides: str) -> RunConfig:
    return RunConfig.from_values(resolve([f"experiment={experiment}", *overrides]), experiment)


def one_policy(*overrides: str) -> RunConfig:
    """A run that trains one 3.2B policy on two ranks, with one agent."""
    layout = ["policies.shared.dp=2", "policies.shared.tp=1", "policies.shared.recompute=full"]
    return config("marti_single_llama", *layout, *overrides)


def test_a_split_pool() -> None:
    run = one_policy()
    models = load_architectures(run)
    n = count_parameters(models["shared"])
    peak = estimate_peak_memory(run, models, H100)

    trainer = estimate_trainers(run, models)["shared", "trainer"]
    assert (trainer.weights, trainer.gradients, trainer.optimizer) == (2 * n, 4 * n, 6 * n)
    assert engine_weights(run, models) == {"shared": 2 * n}
    assert peak.update == trainer.peak + 1e9
    assert peak.rollout == pytest.approx(USABLE)  # the KV cache takes what is left
    assert peak.kv_cache == pytest.approx(USABLE - 2 * n - SERVER)


def test_a_shared_pool_in_which_trainers_and_engines_keep_their_memory() -> None:
    run = one_policy("cluster.pool=shared", "engine.transport=tensor", "engine.replicas=2")
    models = load_architectures(run)
    peak = estimate_peak_memory(run, models, H100)

    trainer = estimate_trainers(run, models)["shared", "trainer"]
    engine = engine_weights(run, models)["shared"]
    assert peak.update == pytest.approx(trainer.peak + engine + peak.kv_cache + 1e9 + SERVER)
    assert peak.update == pytest.approx(USABLE)
    assert peak.rollout == pytest.approx(trainer.persistent + engine + peak.kv_cache + 1e9 + SERVER)


def test_a_shared_pool_in_turn() -> None:
    overrides = ["cluster.pool=shared", "engine.transport=tensor", "engine.replicas=2"]
    run = one_policy(*overrides, *IN_TURN)
    models = load_architectures(run)
    peak = estimate_peak_memory(run, models, H100)

    trainer = estimate_trainers(run, models)["shared", "trainer"]
    engine = engine_weights(run, models)["shared"]
    # A server that sleeps keeps its CUDA graphs, and receives new weights during the update.
    assert peak.update == trainer.peak + engine + 1e9 + SERVER
    assert peak.rollout == pytest.approx(engine + peak.kv_cache + 1e9 + SERVER)
    assert peak.kv_cache > estimate_peak_memory(one_policy(*overrides), models, H100).kv_cache


def test_a_trainer_that_is_not_offloaded_keeps_its_memory_in_the_rollout() -> None:
    shared = [
        "cluster.pool=shared",
        "engine.transport=tensor",
        "engine.sleep=true",
        "policies.solver.offload=true",
    ]
    experiment = "drmas_t1_4b_separate_drmas"
    one_offloaded = config(experiment, *shared)
    both_offloaded = config(experiment, *shared, "policies.verifier.offload=true")
    models = load_architectures(one_offloaded)
    verifier = estimate_trainers(one_offloaded, models)["verifier", "trainer"]
    with_verifier = estimate_peak_memory(one_offloaded, models, H100)
    without = estimate_peak_memory(both_offloaded, models, H100)
    caches = 2 * (with_verifier.kv_cache - without.kv_cache)
    assert with_verifier.rollout - without.rollout == pytest.approx(verifier.persistent + caches)


def test_the_kv_cache_is_bounded_by_the_slots_and_by_the_usable_memory() -> None:
    experiment = "drmas_t1_4b_separate_drmas"
    settings = [
        f"policies.{policy}.overrides.engine={{max_length: 12288, slots: 1}}"
        for policy in ("solver", "verifier")
    ]
    run = config(experiment, *settings)
    models = load_architectures(run)
    # One sequence: 36 layers, eight heads of 128, keys and values of two bytes
    one_sequence = 12288 * 36 * 8 * 128 * 2 * 2
    assert estimate_peak_memory(run, models, H100).kv_cache == 2 * one_sequence


def test_a_kv_cache_may_take_two_gigabytes_even_if_its_slots_need_less() -> None:
    slots = [
        f"policies.{policy}.overrides.engine={{max_length: 4100, slots: 2}}"
        for policy in ("solver", "verifier")
    ]
    large = config("drmas_t1_4b_separate_drmas", *slots)
    two_sequences = 2 * 4100 * 36 * 8 * 128 * 2 * 2
    large_cache = estimate_peak_memory(large, load_architectures(large), H100).kv_cache
    assert 2e9 < large_cache == pytest.approx(2 * two_sequences)

    small = config(
        "drmas_t1_4b_separate_drmas", *slots, "policy_defaults.model=Qwen/Qwen2.5-0.5B-Instruct"
    )
    assert estimate_peak_memory(small, load_architectures(small), H100).kv_cache == 2e9


def test_an_embedded_engine_has_keys_in_every_slot() -> None:
    run = config(
        "drmas_t1_4b_separate_drmas",
        "engine={name: embedded, python: null, slots: 16, max_length: 8192}",
        "policy_defaults.model=Qwen/Qwen2.5-0.5B-Instruct",
        "policy_defaults.bf16=true",
    )
    models = load_architectures(run)
    n = count_parameters(models["solver"])
    assert engine_weights(run, models) == {"solver": 2 * n, "verifier": 2 * n}
    # 24 layers, two heads of 64, keys and values of two bytes
    peak = estimate_peak_memory(run, models, H100)
    assert peak.kv_cache == 16 * 8192 * 24 * 2 * 64 * 2 * 2
    # Prefill of 16,384 tokens and a last prompt of 8,192: 896 elements in float32 and twice in bfloat16,
    # and gate, up projection and their product of 4,864 elements each
    prefill = (16_384 + 8192) * (4 * 896 + 2 * (2 * 896 + 3 * 4864))
    logits = 16 * 5 * 4 * 151_936  # five copies in float32 for each slot
    assert peak.rollout == 2 * n + peak.kv_cache + 1e9 + prefill + logits
    in_float32 = config(
        "drmas_t1_4b_separate_drmas",
        "engine={name: embedded, python: null, slots: 16, max_length: 8192}",
        "policy_defaults.model=Qwen/Qwen2.5-0.5B-Instruct",
        "policy_defaults.bf16=false",
    )
    assert estimate_peak_memory(in_float32, models, H100).kv_cache == 2 * peak.kv_cache


@pytest.mark.parametrize(("one_by_one", "combine"), [("true", max), ("false", sum)])
def test_the_largest_trainer_counts_if_trainers_take_turns(
    one_by_one: str, combine: Callable[[list[float]], float]
) -> None:
    """Two 14.8B policies with critics: four models, of which one is on the GPUs at a time."""
    settings = {
        "policy_defaults.tp": 8,
        "policy_defaults.sp": "true",
        "policy_defaults.dp": 1,
        "policy_defaults.offload": "true",
        "policy_defaults.host_moments": one_by_one,
        "engine.tp": 8,
        "engine.replicas": 1,
        "engine.sleep": "true",
        "engine.transport": "tensor",
        "cluster.pool": "shared",
        "cluster.one_by_one": one_by_one,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    run = config("unitymas_t3_nq_decompose_14b", *overrides)
    models = load_architectures(run)
    trainers = estimate_trainers(run, models)
    assert len(trainers) == 4

    peaks = [trainer.peak for trainer in trainers.values()]
    engines = sum(engine_weights(run, models).values())
    server = 1e9 + 0.9e9 + 2 * 8192 * (3 * 5120 + 3 * 13824 / 8)
    processes = 4 * 1e9 + 2 * server
    peak = estimate_peak_memory(run, models, H100)
    assert peak.update == pytest.approx(combine(peaks) + engines + processes)


def test_an_embedded_engine_that_sleeps_has_its_weights_and_its_process() -> None:
    run = config(
        "drmas_t1_4b_separate_drmas",
        "engine={name: embedded, python: null, slots: 16, max_length: 8192, sleep: true}",
        "policy_defaults={model: Qwen/Qwen2.5-0.5B-Instruct, tp: 1, sp: false, dp: 1, offload: true}",
        "cluster.pool=shared",
    )
    models = load_architectures(run)
    trainers = estimate_trainers(run, models).values()
    engines = engine_weights(run, models).values()
    peak = estimate_peak_memory(run, models, H100)
    expected = sum(trainer.peak for trainer in trainers) + sum(engines) + 4 * 1e9
    assert peak.update == pytest.approx(expected)


def test_a_rank_that_pushes_weights_holds_two_buckets() -> None:
    """With few tokens in a micro-batch, that is more than the backward pass takes."""
    run = one_policy(
        "cluster.pool=shared",
        "engine.transport=tensor",
        "engine.replicas=2",
        "engine.max_length=2048",
        "trainer.microbatch_tokens=2048",
        "agents.player.max_tokens=1024",
        *IN_TURN,
    )
    models = load_architectures(run)
    trainer = estimate_trainers(run, models)["shared", "trainer"]
    buckets = 2 * 2**31
    assert trainer.peak < trainer.persistent + buckets
    engine = engine_weights(run, models)["shared"]
    peak = estimate_peak_memory(run, models, H100)
    assert peak.update == pytest.approx(trainer.persistent + buckets + engine + 1e9 + SERVER)


def test_a_teacher_has_memory_for_logits_of_given_tokens() -> None:
    in_turn = [
        "cluster.pool=shared",
        "engine.transport=tensor",
        "engine.sleep=true",
        "policy_defaults.offload=true",
    ]
    experiment = "drmas_t1_4b_separate_drmas"
    plain = config(experiment, *in_turn)
    taught = config(experiment, *in_turn, "+policies.solver.teacher={policy: verifier}")
    models = load_architectures(plain)
    caches = estimate_peak_memory(plain, models, H100).kv_cache
    fewer = estimate_peak_memory(taught, models, H100).kv_cache
    # 2,048 rows of logits and a copy of them, in float32
    assert 2 * (caches - fewer) == pytest.approx(2 * 2048 * 151_936 * 4)


def test_engines_hold_the_adapters_that_they_serve() -> None:
    lora = "policy_defaults.lora={rank: 16, alpha: 32, targets: [o]}"
    adapter = 16 * 36 * (2560 + 32 * 128)  # B and A of the outputs of 36 layers of Qwen3-4B
    served = config("drmas_t1_4b_shared_drmas", lora, "engine.adapters=slots")
    models = load_architectures(served)
    n = count_parameters(models["shared"])
    # The present version, the one before, and the bare model
    assert engine_weights(served, models) == {"shared": 2 * n + 3 * 2 * adapter}

    embedded = config(
        "drmas_t1_4b_separate_drmas",
        lora,
        "engine={name: embedded, python: null, slots: 16, max_length: 8192}",
        "policy_defaults.share_base=true",
    )
    assert engine_weights(embedded, load_architectures(embedded)) == {
        "solver": 2 * n + 2 * 4 * adapter
    }


def test_micro_batches_of_a_policy() -> None:
    experiment = "drmas_t1_4b_separate_drmas"
    plain = config(experiment)
    longer = config(experiment, "policies.verifier.overrides.trainer={microbatch_tokens: 32768}")
    models = load_architectures(plain)
    before = estimate_trainers(plain, models)
    after = estimate_trainers(longer, models)
    solver = "solver", "trainer"
    verifier = "verifier", "trainer"
    assert after[solver].activations == before[solver].activations
    assert after[verifier].activations == 2 * before[verifier].activations


def test_host_memory_has_a_checkpoint_offloaded_state_and_the_reference() -> None:
    run = one_policy()
    models = load_architectures(run)
    n = count_parameters(models["shared"])
    checkpoint = 12 * n
    assert estimate_host_memory(run, models) == checkpoint

    offloaded = 2 * (2 * n + 6 * n)  # weights and optimizer of two ranks
    in_turn = one_policy("policies.shared.offload=true")
    assert estimate_host_memory(in_turn, models) == checkpoint + offloaded

    reference = 2 * 2 * n
    with_reference = one_policy("loss.kl.coef=0.1")
    assert estimate_host_memory(with_reference, models) == checkpoint + reference

    versions = 2 * 3 * 2 * n  # of two ranks: the weights of the last three versions
    correction = ("loss.correction={name: tis}", "+loss.old_policy=sampled")
    with_versions = one_policy("trainer.staleness=3", *correction)
    assert estimate_host_memory(with_versions, models) == checkpoint + versions

    moments = 8 * n
    on_host = one_policy("policies.shared.host_moments=true")
    assert estimate_host_memory(on_host, models) == checkpoint + moments


def test_only_policies_with_a_kl_term_have_a_reference_in_host_memory() -> None:
    experiment = "drmas_t1_4b_separate_drmas"
    plain = config(experiment)
    solver_only = config(experiment, "policies.solver.overrides.loss={kl: {coef: 0.1}}")
    models = load_architectures(plain)
    weights = estimate_trainers(plain, models)["solver", "trainer"].weights
    reference = plain.policies["solver"].ranks * weights
    assert reference > 0
    assert estimate_host_memory(solver_only, models) == pytest.approx(
        estimate_host_memory(plain, models) + reference
    )


def test_disk_has_one_checkpoint_more_than_is_kept_and_the_finished_model() -> None:
    newest_and_best = one_policy("trainer.keep_checkpoints=2")
    models = load_architectures(newest_and_best)
    n = count_parameters(models["shared"])
    assert estimate_disk(newest_and_best, models) == 4 * 12 * n + 2 * n
    newest = one_policy("trainer.keep_checkpoints=2", "trainer.keep_best=0")
    assert estimate_disk(newest, models) == 3 * 12 * n + 2 * n
    float32 = one_policy(
        "trainer.keep_checkpoints=2", "trainer.keep_best=0", "policies.shared.bf16=false"
    )
    assert estimate_disk(float32, models) == 3 * 12 * n + 4 * n
