"""Steps of TRL's `GRPOTrainer`, in an environment of TRL's: one for each line on stdin, what it took on stdout.

Nothing of this project is imported. The argument is a job in JSON; a line that begins with `row` holds the seconds of a
step: all, CPU time, and of them those of generating and scoring.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM, TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer


class OnDemand(TrainerCallback):
    """Has the trainer wait before each step until there is a line on stdin."""

    row: dict[str, float]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        print("ready", flush=True)
        if not sys.stdin.readline():
            raise SystemExit
        self.row = {}
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wall, cpu = self._began
        self.row |= {"step": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print("row", json.dumps(self.row), flush=True)


def odd(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for a reply whose token ids have an odd sum."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def main() -> None:
    """Train until stdin ends."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    replies = job["group"] * job["tasks"]
    waits = OnDemand()
    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=PreTrainedTokenizerFast.from_pretrained(job["model"]),
        reward_funcs=odd,
        train_dataset=Dataset.from_dict({"prompt": job["prompts"]}),
        callbacks=[waits],
        args=GRPOConfig(
            output_dir=job["out"],
            per_device_train_batch_size=replies // job["parts"],
            gradient_accumulation_steps=job["parts"],
            num_generations=job["group"],
            max_completion_length=job["reply"],
            shuffle_dataset=False,
            learning_rate=job["lr"],
            max_steps=100_000,
            beta=0.0,
            gradient_checkpointing=False,  # it saves memory and costs a forward pass
            bf16=job["bf16"],
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    assert [trainer._tokenize_prompts([text])[0][0] for text in job["prompts"][:1]] == [job["ids"]]
    collect = trainer._generate_and_score_completions

    def timed(*given: Any) -> Any:
        began = time.perf_counter()
        found = collect(*given)
        waits.row["collect"] = time.perf_counter() - began
        waits.row["tokens"] = int(found["completion_mask"].sum())
        return found

    trainer._generate_and_score_completions = timed
    trainer.train()


if __name__ == "__main__":
    main()
