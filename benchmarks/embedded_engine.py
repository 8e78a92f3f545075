"""Completion tokens per CPU second: the embedded engine against Hugging Face `generate` on a ragged multi-turn load."""

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

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.records.trajectory import Completion, Sampling

TASKS, SAMPLES, TURNS, MAX_LENGTH, VOCAB = 16, 8, 3, 512, 512
HF_BATCHES = (32, 128)  # the faster one is the reference


@dataclass(frozen=True, slots=True)
class Load:
    """Trajectories of `TURNS` turns; a turn's prompt is the last prompt, its completion and an observation."""

    prompts: list[list[int]]  # first prompts, equal within a task
    lengths: np.ndarray  # [trajectories, TURNS] completion tokens
    observations: list[list[list[int]]]  # [trajectories][TURNS] token ids after each turn


def make_load(seed: int) -> Load:
    rng = np.random.default_rng(seed)
    tasks = [rng.integers(1, VOCAB, rng.integers(30, 150)).tolist() for _ in range(TASKS)]
    count = TASKS * SAMPLES
    return Load(
        prompts=[tasks[i // SAMPLES] for i in range(count)],
        lengths=rng.integers(3, 61, (count, TURNS)),
        observations=[
            [rng.integers(1, VOCAB, rng.integers(5, 30)).tolist() for _ in range(TURNS)]
            for _ in range(count)
        ],
    )


def run_engine(engine: EmbeddedEngine, load: Load, seed: int) -> float:
    """CPU seconds; a trajectory's next turn starts when its last has ended."""
    began = time.process_time()
    history = [list(prompt) for prompt in load.prompts]
    turn = [0] * len(history)

    def submit(i: int) -> None:
        sampling = Sampling(
            max_tokens=int(load.lengths[i, turn[i]]), seed=seed + i * TURNS + turn[i]
        )
        engine.submit(i, history[i], sampling)

    for i in range(len(history)):
        submit(i)
    while engine.has_work:
        for i, completion in engine.step():
            assert isinstance(completion, Completion)
            history[i] += [*completion.token_ids, *load.observations[i][turn[i]]]
            turn[i] += 1
            if turn[i] < TURNS:
                submit(i)
    return time.process_time() - began


@torch.inference_mode()
def run_generate(model: Qwen2ForCausalLM, load: Load, batch: int) -> float:
    """CPU seconds; turns in lock-step, batches of similar prompt lengths, left-padded, as long as their longest."""
    began = time.process_time()
    history = [list(prompt) for prompt in load.prompts]
    for turn in range(TURNS):
        order = sorted(range(len(history)), key=lambda i: len(history[i]))
        for first in range(0, len(order), batch):
            members = order[first : first + batch]
            width = max(len(history[i]) for i in members)
            ids = torch.tensor([[0] * (width - len(history[i])) + history[i] for i in members])
            mask = torch.tensor(
                [[0] * (width - len(history[i])) + [1] * len(history[i]) for i in members]
            )
            new = int(load.lengths[members, turn].max())
            settings = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
            out = model.generate(ids, attention_mask=mask, max_new_tokens=new, **settings)[
                :, width:
            ].tolist()
            for i, tokens in zip(members, out, strict=True):
                history[i] += tokens[: load.lengths[i, turn]] + load.observations[i][turn]
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
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
    model = Qwen2ForCausalLM(config).eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"model of {parameters / 1e6:.2f} M parameters; {TASKS * SAMPLES} trajectories of {TURNS} turns; one thread"
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = EmbeddedEngine.from_folder(folder, max_length=MAX_LENGTH)
    warm = make_load(99)
    run_engine(engine, warm, 0)
    batch = min(HF_BATCHES, key=lambda size: run_generate(model, warm, size))
    ratios = []
    for repeat in range(repeats):
        load = make_load(repeat)
        tokens = int(load.lengths.sum())
        engine.load_weights(iter(model.state_dict().items()), repeat)  # nothing is cached
        before = {name: getattr(engine.stats, name) for name in engine.stats.__slots__}
        ours = run_engine(engine, load, repeat << 32)
        theirs = run_generate(model, load, batch)
        ratios.append(theirs / ours)
        spent = {name: getattr(engine.stats, name) - value for name, value in before.items()}
        print(
            f"engine {tokens / ours:.0f} tokens per CPU second (prefill {spent['prefill_s']:.2f} s for "
            f"{spent['prefill_tokens']} tokens, {spent['cached_tokens']} reused; decoding {spent['decode_s']:.2f} s in "
            f"{spent['steps']} passes; sampling {spent['sample_s']:.2f} s; rest "
            f"{ours - spent['prefill_s'] - spent['decode_s'] - spent['sample_s']:.2f} s), "
            f"generate {tokens / theirs:.0f} (batches of {batch})"
        )
    print(
        f"name=embedded_engine ratio={statistics.median(ratios):.2f} goal=3.00 reference=hf_generate n={repeats}"
    )


if __name__ == "__main__":
    main()
