"""The embedded engine's scheduling, prefix reuse and model families, step by step."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollout.engines.embedded import EmbeddedEngine
from rollout.engines.local import LocalEngine
from rollout.engines.protocol import Completion, EngineError, Sampling
from rollout.engines.sampler import uniforms

LOGPROB_TOLERANCE = 5e-5  # nats; float32 sums in another order move a log-probability by up to about 1.5e-5

torch.set_num_threads(1)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def save(path: Path, model: Any) -> Any:
    model.eval().save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    save(path, Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)))
    return path


def drain(engine: EmbeddedEngine) -> dict[int, Any]:
    done: dict[int, Any] = {}
    while engine.has_work:
        done.update(engine.step())
    return done


def steps(engine: EmbeddedEngine, count: int) -> None:
    for _ in range(count):
        assert engine.step() == []


@torch.no_grad()
def worst(model: Any, prompt: list[int], completion: Completion) -> float:
    logits = model(torch.tensor([prompt + list(completion.token_ids)])).logits[0, len(prompt) - 1 : -1]
    right = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return float((right - torch.tensor(completion.logprobs)).abs().max())


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=False, rope_theta=5e5)),
        (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
        (
            LlamaForCausalLM,
            LlamaConfig(
                **SIZES,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            ),
        ),
    ],
    ids=["qwen2-untied", "qwen3", "llama3"],
)
def test_model_families_match_hugging_face(tmp_path: Path, model_class: Any, config: Any) -> None:
    torch.manual_seed(1)
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    save(tmp_path, model)
    engine = EmbeddedEngine.from_folder(tmp_path, max_length=300)
    prompt = np.random.default_rng(0).integers(0, 64, 200).tolist()
    engine.submit(1, prompt, Sampling(max_tokens=50))
    assert worst(model, prompt, drain(engine)[1]) < LOGPROB_TOLERANCE


def test_prefix_reuse_changes_nothing_but_the_work(folder: Path) -> None:
    rng = np.random.default_rng(3)
    system = rng.integers(0, 64, 20).tolist()
    members = [10 * group + sample for group in range(3) for sample in range(3)]
    seen: dict[bool, list[Completion]] = {}
    work = {}
    for reuse in (True, False):
        engine = EmbeddedEngine.from_folder(folder, max_length=200, rows=12, reuse_prefixes=reuse)
        history = {key: [*system, *range(key // 10, key // 10 + 20)] for key in members}
        seen[reuse] = []
        for turn in range(3):
            for key in members:
                engine.submit(key, history[key], Sampling(max_tokens=3 + key % 7, seed=turn * 100 + key))
            for key, completion in sorted(drain(engine).items()):
                seen[reuse].append(completion)
                history[key] = [*history[key], *completion.token_ids, 1, 2, 3]
        work[reuse] = engine.stats.prefill_tokens
    for reused, plain in zip(seen[True], seen[False], strict=True):
        assert reused.token_ids == plain.token_ids
        assert reused.logprobs == pytest.approx(plain.logprobs, abs=LOGPROB_TOLERANCE)
    # Turn 1: the system prompt once, each group's 20 tokens once. Turns 2 and 3: the last sampled token and 3 new ones.
    assert work[True] == 20 + 3 * 20 + 2 * 9 * 4
    assert work[False] > 9 * (40 + 45 + 55)


def test_requests_wait_for_a_row(folder: Path) -> None:
    engine = EmbeddedEngine.from_folder(folder, max_length=64, rows=2)
    for i in range(5):
        engine.submit(i, [i, i + 1], Sampling(max_tokens=4, seed=i))
    assert engine.step() == []  # the first token comes with the prompt, the second with the first decoding pass
    assert engine.stats.decode_tokens == 4
    done = drain(engine)
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert engine.stats.steps == 9  # three waves of three passes
    assert not engine.has_work


def test_update_in_the_middle_gives_two_spans_and_keeps_old_keys(folder: Path) -> None:
    engine = EmbeddedEngine.from_folder(folder, max_length=64, version=3)
    torch.manual_seed(5)
    other = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    engine.submit(1, prompt, Sampling(max_tokens=10))
    steps(engine, 3)  # 4 tokens
    engine.load_weights(other.state_dict().items(), 4)
    engine.load_weights(other.state_dict().items(), 5)  # no token was sampled by version 4
    completion = drain(engine)[1]
    assert [(span.version, span.start, span.end) for span in completion.versions] == [(3, 0, 4), (5, 4, 10)]
    engine.submit(2, [*prompt, *completion.token_ids], Sampling(max_tokens=10))
    after = drain(engine)[2]
    assert after.cached_tokens == 0  # what ran across the update is no one's prefix
    assert worst(other, [*prompt, *completion.token_ids], after) < LOGPROB_TOLERANCE


def test_abort(folder: Path) -> None:
    engine = EmbeddedEngine.from_folder(folder, max_length=64, rows=1)
    running, waiting, later, unknown = 1, 2, 3, 4
    engine.submit(running, [1, 2], Sampling(max_tokens=20))
    engine.submit(waiting, [1, 2], Sampling(max_tokens=20))
    engine.submit(later, [1, 2], Sampling(max_tokens=2))
    steps(engine, 2)
    engine.abort({running, waiting, unknown})
    done = drain(engine)
    assert {key: (one.finish_reason, len(one.token_ids)) for key, one in done.items()} == {
        running: ("abort", 3),
        waiting: ("abort", 0),
        later: ("length", 2),
    }
    assert done[waiting].versions[-1].version == 0


def test_broken_weights_are_an_error_not_a_crash(folder: Path) -> None:
    engine = EmbeddedEngine.from_folder(folder, max_length=64)
    model = Qwen2ForCausalLM.from_pretrained(folder)
    state = dict(model.state_dict())
    engine.load_weights(((name, tensor * float("nan")) for name, tensor in state.items()), 8)
    engine.submit(1, [1, 2], Sampling(max_tokens=4, top_p=0.9))
    with pytest.raises(EngineError, match="weights version 8 give logits that are not finite"):
        raise drain(engine)[1]
    engine.load_weights(state.items(), 9)
    engine.submit(1, [1, 2], Sampling(max_tokens=4))
    assert worst(model, [1, 2], drain(engine)[1]) < LOGPROB_TOLERANCE


def test_what_broken_weights_left_in_a_row_harms_no_one(folder: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folder)
    state = dict(model.state_dict())
    engine = EmbeddedEngine.from_folder(folder, max_length=64, rows=2)
    engine.load_weights(((name, tensor * float("nan")) for name, tensor in state.items()), 8)
    engine.submit(1, list(range(30)), Sampling(max_tokens=4))
    assert isinstance(drain(engine)[1], EngineError)
    engine.load_weights(state.items(), 9)
    prompts = {1: [1, 2], 2: list(range(40, 60))}  # side by side, the first is as wide as the second
    for key, prompt in prompts.items():
        engine.submit(key, prompt, Sampling(max_tokens=4))
    done = drain(engine)
    assert max(worst(model, prompt, done[key]) for key, prompt in prompts.items()) < LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json: not readable"),
        ('{"model_type": "mamba"}', "model_type 'mamba' is not supported; known: llama, qwen2, qwen3"),
        ('{"model_type": "qwen2"}', "no key 'num_attention_heads'"),
        ('{"model_type": "qwen2", "use_sliding_window": true}', "use_sliding_window is set"),
        (
            '{"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}',
            "layer_types has more than",
        ),
        ('{"model_type": "qwen2", "hidden_act": "gelu"}', "hidden_act is set"),
        ('{"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}}', "rope_type 'yarn' is not supported"),
        (
            '{"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 4.0}}',
            "rope_type 'yarn' is not supported",
        ),
        ('{"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}', "rope_type 'llama3' needs factor"),
    ],
)
def test_a_bad_folder_is_told_in_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError, match=message):
        EmbeddedEngine.from_folder(tmp_path, max_length=64)


def test_a_folder_without_or_with_broken_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(EngineError, match=r"no \*.safetensors file"):
        EmbeddedEngine.from_folder(tmp_path, max_length=64)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(EngineError, match=r"model\.safetensors: not a readable safetensors file"):
        EmbeddedEngine.from_folder(tmp_path, max_length=64)


def test_a_deterministic_engine_gives_the_same_bits_whatever_runs_beside(folder: Path) -> None:
    generator = np.random.default_rng(3)
    prompts = [generator.integers(0, 64, size).tolist() for size in (3, 17, 40, 5, 29)]
    prompts += [prompts[1], [*prompts[2][:30], 1, 2]]  # one again, and one that shares a prefix

    def play(*batches: list[int], rows: int = 8) -> dict[int, Completion]:
        engine = EmbeddedEngine.from_folder(folder, max_length=64, rows=rows, deterministic=True)
        done: dict[int, Completion] = {}
        for batch in batches:
            for number in batch:
                engine.submit(number, prompts[number], Sampling(max_tokens=20, seed=number))
            done |= drain(engine)
        return done

    alone = play(*([number] for number in range(len(prompts))))
    for other in (play([0, 1, 2, 3, 4, 5, 6]), play([6, 2, 5], [4, 1, 0, 3]), play([5, 4, 3, 2, 1, 0, 6], rows=3)):
        for number, completion in alone.items():
            assert other[number].token_ids == completion.token_ids
            assert other[number].logprobs == completion.logprobs  # not a bit apart
            assert other[number].cached_tokens in (0, len(prompts[1]))


def converse(engine: EmbeddedEngine, number: int, prompt: list[int], new: int = 3) -> tuple[Completion, list[int]]:
    """One completion, and the prompt of the turn after it."""
    engine.submit(number, prompt, Sampling(max_tokens=new, seed=number))
    completion = drain(engine)[number]
    return completion, [*prompt, *completion.token_ids, 63]


def test_what_was_used_longest_ago_gives_way(folder: Path) -> None:
    engine = EmbeddedEngine.from_folder(folder, max_length=64, rows=2)
    first, second = [1] * 10, [2] * 10
    for prompt, other in ((first, second), (second, first)):
        _, again = converse(engine, 0, prompt)
        converse(engine, 1, other)
        kept, last = converse(engine, 2, again)  # the older one is used once more
        assert kept.cached_tokens == 10 + 2
        converse(engine, 3, [3] * 10)  # takes the row of the other
        assert converse(engine, 4, last)[0].cached_tokens == len(last) - 2
        assert converse(engine, 5, [*other, 4])[0].cached_tokens == 0
        engine.load_weights(Qwen2ForCausalLM.from_pretrained(folder).state_dict().items(), 0)  # forget everything


def test_a_row_of_no_use_gives_way_first(folder: Path) -> None:
    engine = EmbeddedEngine.from_folder(folder, max_length=64, rows=2)
    engine.submit(0, [1, 2, 3], Sampling(max_tokens=20))
    engine.step()
    engine.load_weights(Qwen2ForCausalLM.from_pretrained(folder).state_dict().items(), 1)
    _, again = converse(engine, 1, [4] * 10)  # has ended when the other does, whose keys are of two versions
    assert not engine.has_work
    converse(engine, 2, [5] * 10)
    assert converse(engine, 3, again)[0].cached_tokens == 10 + 2


def test_a_longer_conversation_is_not_overwritten_by_one_that_begins_like_it(folder: Path) -> None:
    engine = EmbeddedEngine.from_folder(folder, max_length=64, rows=3)
    _, again = converse(engine, 0, [*range(10), *[20] * 10])
    assert converse(engine, 1, [*range(10), *[30] * 10])[0].cached_tokens == 10
    assert converse(engine, 2, again)[0].cached_tokens == 20 + 2


def test_a_twin_is_no_ones_source_before_it_has_its_keys(folder: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folder)
    engine = EmbeddedEngine.from_folder(folder, max_length=64, rows=3)
    followed = [converse(engine, number, [number] * 20)[1] for number in range(3)]
    converse(engine, 3, followed[0])
    converse(engine, 4, followed[2])  # row 1 is now the oldest, then 0, then 2
    prompts = {5: [*range(40, 60)], 6: [*range(40, 60)], 7: [*range(40, 55), 1]}  # row 1, its twin in 0, a cousin in 2
    for number, prompt in prompts.items():
        engine.submit(number, prompt, Sampling(max_tokens=4))
    done = drain(engine)
    assert [done[number].cached_tokens for number in prompts] == [0, 20, 15]
    assert max(worst(model, prompt, done[number]) for number, prompt in prompts.items()) < LOGPROB_TOLERANCE


def test_a_single_token_is_no_ones_prefix_until_it_has_keys(folder: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folder)
    engine = EmbeddedEngine.from_folder(folder, max_length=64)
    prompt = [*range(20)]
    for number in range(3):  # one computes the prompt, the others copy it
        engine.submit(number, prompt, Sampling(max_tokens=1, seed=number))
    firsts = {number: one.token_ids for number, one in drain(engine).items()}
    assert len(set(firsts.values())) == 3
    for number, first in firsts.items():
        longer = [*prompt, *first, 1, 2]
        engine.submit(number, longer, Sampling(max_tokens=4))
        second = drain(engine)[number]
        assert second.cached_tokens == 20
        assert worst(model, longer, second) < LOGPROB_TOLERANCE


def test_a_step_that_breaks_fails_who_waits_and_nobody_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(folder, max_length=64, rows=2)

    def breaks(*_: Any) -> None:
        raise RuntimeError("out of memory")

    async def play() -> Completion:
        with monkeypatch.context() as broken:
            broken.setattr(engine.core.decoder, "decode", breaks)
            asked = [engine.generate([1, 2, number], Sampling(max_tokens=9)) for number in range(5)]
            for error in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(error, EngineError)
                assert str(error) == "the engine failed: RuntimeError: out of memory"
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine._pump
        assert not engine.core.has_work
        return await engine.generate([1, 2, 3], Sampling(max_tokens=9))

    model = Qwen2ForCausalLM.from_pretrained(folder)
    assert worst(model, [1, 2, 3], asyncio.run(play())) < LOGPROB_TOLERANCE


def test_a_cache_under_pressure_changes_no_log_probability(folder: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folder)
    rng = np.random.default_rng(5)
    engine = EmbeddedEngine.from_folder(folder, max_length=96, rows=4)
    talks = [[*range(12), *rng.integers(0, 64, rng.integers(0, 8)).tolist()] for _ in range(9)]
    reused = 0
    for turn in range(4):
        asked = {int(number): list(talks[number]) for number in rng.permutation(9)[:6]}
        for number, prompt in asked.items():
            engine.submit(number, prompt, Sampling(max_tokens=int(rng.integers(1, 9)), seed=turn))
        engine.step()
        engine.abort({next(iter(asked))})
        for number, completion in drain(engine).items():
            reused += completion.cached_tokens
            if completion.token_ids:
                assert worst(model, asked[number], completion) < LOGPROB_TOLERANCE
            talks[number] = [*talks[number], *completion.token_ids, turn]
    assert reused > 200


def test_a_tied_head_may_come_but_not_differ(folder: Path) -> None:
    state = dict(Qwen2ForCausalLM.from_pretrained(folder).state_dict())
    engine = EmbeddedEngine.from_folder(folder, max_length=64)
    other = state["lm_head.weight"].clone()
    engine.load_weights({**state, "lm_head.weight": other}.items(), 1)
    other[0, 0] += 1
    with pytest.raises(EngineError, match=r"'lm_head\.weight' differs from the embedding to which"):
        engine.load_weights({**state, "lm_head.weight": other}.items(), 2)
    assert engine.version == 1


def test_after_an_update_new_weights_read_old_keys(folder: Path) -> None:
    old = Qwen2ForCausalLM.from_pretrained(folder)
    torch.manual_seed(5)
    new = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)).eval()
    engine = EmbeddedEngine.from_folder(folder, max_length=64)
    prompt = [1, 2, 3, 4, 5]
    engine.submit(1, prompt, Sampling(max_tokens=9))
    steps(engine, 2)  # 3 tokens, the last without keys
    engine.load_weights(new.state_dict().items(), 1)
    completion = drain(engine)[1]
    assert [(span.version, span.start, span.end) for span in completion.versions] == [(0, 0, 3), (1, 3, 9)]
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        before = old(ids[:, : 5 + 2], use_cache=True)
        after = new(ids[:, 5 + 2 : -1], past_key_values=before.past_key_values).logits[0]
    logits = torch.cat([before.logits[0, 4:], after])
    right = logits.log_softmax(-1).gather(-1, ids[0, 5:, None])[:, 0]
    assert completion.logprobs == pytest.approx(right.tolist(), abs=LOGPROB_TOLERANCE)
    with torch.no_grad():
        alone = new(ids).logits[0, 4:-1].log_softmax(-1).gather(-1, ids[0, 5:, None])[:, 0]
    assert (alone - right).abs().min() > 1e-3  # no token would be taken for one of the other version


def test_a_token_is_drawn_by_its_seed_and_its_place_in_the_completion(folder: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folder)
    engine = EmbeddedEngine.from_folder(folder, max_length=64)
    prompt = [3, 1, 4, 1, 5]
    for number in (11, 2**64 - 1):
        engine.submit(number, prompt, Sampling(max_tokens=20, seed=number, temperature=0.8))
    for number, completion in drain(engine).items():
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, 4:-1]
        below = (logits.double() / 0.8).softmax(-1).cumsum(-1).numpy()
        draws = uniforms(np.full(20, number, dtype=np.uint64), np.arange(20))
        assert completion.token_ids == tuple(int(np.searchsorted(row, u)) for row, u in zip(below, draws, strict=True))


def test_sleep_forgets_keys_and_keeps_weights(folder: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folder)
    engine = EmbeddedEngine.from_folder(folder, max_length=64)
    prompt = [*range(30)]
    engine.submit(1, prompt, Sampling(max_tokens=20))
    engine.step()
    with pytest.raises(EngineError, match="cannot sleep while requests are running"):
        engine.sleep()
    engine.abort({1})
    with pytest.raises(EngineError, match="cannot sleep"):  # what was aborted has not been told
        engine.sleep()
    drain(engine)
    engine.sleep()
    engine.submit(2, prompt, Sampling(max_tokens=2))
    assert str(drain(engine)[2]) == "the engine sleeps; wake it first"
    engine.wake(("weights",))
    engine.submit(3, prompt, Sampling(max_tokens=2))
    assert isinstance(drain(engine)[3], EngineError)  # there is no room for keys yet
    engine.wake()
    engine.submit(4, prompt, Sampling(max_tokens=9))
    completion = drain(engine)[4]
    assert completion.cached_tokens == 0
    assert worst(model, prompt, completion) < LOGPROB_TOLERANCE


def test_stop_tokens_are_a_requests_own(folder: Path) -> None:
    engine = EmbeddedEngine.from_folder(folder, max_length=64, rows=2)
    free = Sampling(max_tokens=40, seed=next(seed for seed in range(20) if 0 in said(engine, seed)))
    tokens = said(engine, free.seed)
    stops = tuple(dict.fromkeys(tokens))[1:4]
    engine.submit(1, [9], replace(free, stop=stops))
    assert drain(engine)[1].token_ids == tokens[: tokens.index(stops[0]) + 1]
    for number in (2, 3):  # also in the row that it had
        engine.submit(number, [9], replace(free, stop=(70,)))  # one where there is room for three
    assert {one.token_ids for one in drain(engine).values()} == {tokens}
    engine.submit(4, [9], free)
    engine.submit(5, [8], Sampling(max_tokens=4))
    steps(engine, 1)
    engine.submit(6, [9], replace(free, stop=(70, 71, 72, 73)))  # there is room made for four; 0 is among the tokens
    done = drain(engine)
    assert done[4].token_ids == done[6].token_ids == tokens


def said(engine: EmbeddedEngine, seed: int) -> tuple[int, ...]:
    engine.submit(0, [9], Sampling(max_tokens=40, seed=seed))
    tokens: tuple[int, ...] = drain(engine)[0].token_ids
    return tokens


def test_aborts_in_a_full_house_let_the_waiting_in(folder: Path) -> None:
    engine = EmbeddedEngine.from_folder(folder, max_length=64, rows=2)
    for number in range(6):
        engine.submit(number, [number] * (50 if number == 2 else 3), Sampling(max_tokens=14))
    steps(engine, 3)
    engine.abort({0, 1, 3})
    done = dict(engine.step())
    assert {number: (one.finish_reason, len(one.token_ids)) for number, one in done.items()} == {
        0: ("abort", 4),
        1: ("abort", 4),
        3: ("abort", 0),
    }
    engine.abort({0, 1, 3})  # long gone
    engine.submit(6, [6], Sampling(max_tokens=1))  # came after the long prompt
    order = []
    while engine.has_work:
        order += [number for number, _ in engine.step()]
    assert order == [2, 4, 6, 5]  # in the order of their coming, whatever their length: 5 and 6 waited for 2 and 4


def test_a_folder_in_bfloat16_and_pieces(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert (tmp_path / "model.safetensors.index.json").exists()
    engine = EmbeddedEngine.from_folder(tmp_path, max_length=64)
    held = dict(engine.decoder.weights.tensors())
    for name, tensor in model.state_dict().items():
        assert torch.equal(held[name], tensor.float())
    engine.submit(1, [5, 6, 7], Sampling(max_tokens=20))
    widened = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert worst(widened, [5, 6, 7], drain(engine)[1]) < LOGPROB_TOLERANCE
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(EngineError, match="is missing from the update"):
        EmbeddedEngine.from_folder(tmp_path, max_length=64)
