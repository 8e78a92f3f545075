"""Tokens per CPU second of the embedded engine, against Hugging Face `generate`, on a ragged multi-turn load."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, logging

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Completion, Sampling

TASKS = 16
SAMPLES = 8
TURNS = 3
MAX_LENGTH = 512
VOCAB = 512
GOAL = 3.0
HF_BATCH_SIZES = (32, 128)  # the faster one is the reference


@dataclass(frozen=True, slots=True)
class Load:
    """Trajectories of TURNS turns; the prompt of a turn is the previous prompt, its completion and an observation.

    Attributes:
        prompts: first prompt of each trajectory; those of one task are equal.
        lengths: [trajectories, TURNS] tokens of each completion.
        observations: [trajectories][TURNS] token ids after each turn.
    """

    prompts: list[list[int]]
    lengths: np.ndarray
    observations: list[list[list[int]]]


def make_load(seed: int) -> Load:
    """Draw a load at random."""
    random = np.random.default_rng(seed)

    def draw_ids(shortest: int, longest: int) -> list[int]:
        return random.integers(1, VOCAB, random.integers(shortest, longest)).tolist()

    task_prompts = [draw_ids(30, 150) for _ in range(TASKS)]
    count = TASKS * SAMPLES
    return Load(
        prompts=[task_prompts[i // SAMPLES] for i in range(count)],
        lengths=random.integers(3, 61, (count, TURNS)),
        observations=[[draw_ids(5, 30) for _ in range(TURNS)] for _ in range(count)],
    )


def run_engine(engine: EmbeddedEngine, load: Load, seed: int) -> float:
    """Generate all turns with the engine, each trajectory at its own pace; return the CPU seconds."""
    began = time.process_time()
    histories = [list(prompt) for prompt in load.prompts]
    turns = [0] * len(histories)

    def submit(i: int) -> None:
        max_tokens = int(load.lengths[i, turns[i]])
        sampling = Sampling(max_tokens=max_tokens, seed=seed + i * TURNS + turns[i])
        engine.submit(i, histories[i], sampling)

    for i in range(len(histories)):
        submit(i)
    while engine.has_work:
        for i, completion in engine.step():
            assert isinstance(completion, Completion)
            histories[i] += [*completion.token_ids, *load.observations[i][turns[i]]]
            turns[i] += 1
            if turns[i] < TURNS:
                submit(i)
    return time.process_time() - began


@torch.inference_mode()
def run_generate(model: Qwen2ForCausalLM, load: Load, batch_size: int) -> float:
    """Generate all turns with Hugging Face, in lock-step; return the CPU seconds.

    A batch has prompts of similar length, is left-padded, and generates as many tokens as its
    longest completion.
    """
    began = time.process_time()
    histories = [list(prompt) for prompt in load.prompts]
    for turn in range(TURNS):
        order = sorted(range(len(histories)), key=lambda i: len(histories[i]))
        for start in range(0, len(order), batch_size):
            members = order[start : start + batch_size]
            width = max(len(histories[i]) for i in members)
            padding = [width - len(histories[i]) for i in members]
            ids = [[0] * pad + histories[i] for pad, i in zip(padding, members, strict=True)]
            mask = [[0] * pad + [1] * (width - pad) for pad in padding]
            output = model.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=int(load.lengths[members, turn].max()),
                do_sample=True,
                top_k=0,
                eos_token_id=None,
                pad_token_id=0,
            )
            completions = output[:, width:].tolist()
            for i, completion in zip(members, completions, strict=True):
                histories[i] += completion[: load.lengths[i, turn]] + load.observations[i][turn]
    return time.process_time() - began


def make_hf_model() -> Qwen2ForCausalLM:
    """Return a small model with random weights."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_hf_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"model of {parameters / 1e6:.2f} M parameters; {TASKS * SAMPLES} trajectories of {TURNS} "
        "turns; one thread"
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = EmbeddedEngine.from_folder(folder, max_length=MAX_LENGTH)

    warm_up = make_load(99)
    run_engine(engine, warm_up, 0)
    batch_size = min(HF_BATCH_SIZES, key=lambda size: run_generate(model, warm_up, size))

    ratios = []
    for repeat in range(repeats):
        load = make_load(repeat)
        engine.load_weights(iter(model.state_dict().items()), repeat)  # empties the prefix cache
        before = {name: getattr(engine.stats, name) for name in engine.stats.__slots__}
        engine_s = run_engine(engine, load, repeat << 32)
        spent = {name: getattr(engine.stats, name) - value for name, value in before.items()}
        generate_s = run_generate(model, load, batch_size)
        ratios.append(generate_s / engine_s)
        tokens = int(load.lengths.sum())
        other_s = engine_s - spent["prefill_s"] - spent["decode_s"] - spent["sample_s"]
        print(
            f"engine {tokens / engine_s:.0f} tokens per CPU second (prefill "
            f"{spent['prefill_s']:.2f} s for {spent['prefill_tokens']} tokens, "
            f"{spent['cached_tokens']} reused; decoding {spent['decode_s']:.2f} s in "
            f"{spent['steps']} passes; sampling {spent['sample_s']:.2f} s; rest {other_s:.2f} s), "
            f"generate {tokens / generate_s:.0f} (batches of {batch_size})"
        )
    print_result(
        "embedded_engine",
        statistics.median(ratios),
        goal=GOAL,
        reference="hf_generate",
        repeats=repeats,
    )


if __name__ == "__main__":
    main()
