"""Training steps of TRL's `GRPOTrainer`, which runs in an environment of its own and imports nothing of this project.

The argument is a job in JSON. Before each step the program prints `ready` and waits for a line on
stdin. After each step it prints a line `row` with a JSON object: seconds and CPU seconds of the step,
seconds of generating and scoring (`collect`), and generated tokens.
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


class StepOnDemand(TrainerCallback):
    """Callback that starts each step when a line arrives on stdin, and prints the measurements of the step.

    Attributes:
        row: measurements of the current step by name.
    """

    row: dict[str, float]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        print("ready", flush=True)
        if not sys.stdin.readline():
            raise SystemExit
        self.row = {}
        self._wall_began = time.perf_counter()
        self._cpu_began = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.row["step"] = time.perf_counter() - self._wall_began
        self.row["cpu"] = time.process_time() - self._cpu_began
        print("row", json.dumps(self.row), flush=True)


def reward_odd_sums(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return 1 for each reply whose token ids have an odd sum, else 0."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def main() -> None:
    """Train until stdin ends."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    replies = job["group"] * job["tasks"]
    step_on_demand = StepOnDemand()
    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=PreTrainedTokenizerFast.from_pretrained(job["model"]),
        reward_funcs=reward_odd_sums,
        train_dataset=Dataset.from_dict({"prompt": job["prompts"]}),
        callbacks=[step_on_demand],
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
            gradient_checkpointing=False,  # would save memory, and cost a forward pass
            bf16=job["bf16"],
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    first_prompt = job["prompts"][0]
    assert trainer._tokenize_prompts([first_prompt])[0][0] == job["ids"]
    generate_and_score = trainer._generate_and_score_completions

    def timed_generate_and_score(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = generate_and_score(*arguments)
        step_on_demand.row["collect"] = time.perf_counter() - began
        step_on_demand.row["tokens"] = int(result["completion_mask"].sum())
        return result

    trainer._generate_and_score_completions = timed_generate_and_score
    trainer.train()


if __name__ == "__main__":
    main()
