"""Stand-in with the interface of `verifiers` 0.1: environments that ask for sums."""

import asyncio
import json
import os
import sys
import time
import urllib.request
from typing import Any

from verifiers.types import ClientConfig


def load_environment(env_id: str, **options: Any) -> "Sums":
    """Return an environment; `no-such-env` cannot be loaded."""
    if env_id == "no-such-env":
        raise ImportError(f"no environment {env_id}")
    return Sums(env_id, **options)


class Sums:
    """Environment that asks for a sum; `two-turns` asks again after a wrong answer."""

    def __init__(self, env_id: str, size: int = 30, evaluated: int = 0) -> None:
        self.env_id = env_id
        self.requires_group_rollouts = env_id == "in-groups"
        self.rows = [make_row(number) for number in range(size)]
        self.evaluated = [make_row(number) for number in range(1000, 1000 + evaluated)]
        print("environments print to the standard output")

    def get_dataset(self, n: int) -> list[dict[str, Any]]:
        return self.rows[:n]

    def build_eval_dataset(self) -> list[dict[str, Any]] | None:
        return self.evaluated or None

    def get_eval_dataset(self, n: int) -> list[dict[str, Any]]:
        return self.evaluated[:n]

    async def run_rollout(
        self,
        input: dict[str, Any],
        client: ClientConfig,
        model: str,
        sampling_args: dict[str, Any],
    ) -> dict[str, Any]:
        if self.env_id == "without-calls":
            return {"error": None, "reward": 1.0, "metrics": {"process": os.getpid()}}
        messages = list(input["prompt"])
        turns = 2 if self.env_id == "two-turns" else 1
        for turn in range(1, turns + 1):
            reply = await asyncio.to_thread(ask, client, model, messages)
            if reply == "hang":
                time.sleep(600)  # it blocks the event loop
            if reply == "exit":
                print("the environment exits", file=sys.stderr, flush=True)
                os._exit(3)
            if reply == input["answer"] or turn == turns:
                break
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": "Try again."},
            ]
        return {
            "error": "the tool broke" if reply == "break" else None,
            "reward": float(reply == input["answer"]) / turn,
            "metrics": {"turns": turn},
        }


def make_row(number: int) -> dict[str, Any]:
    """Return the row of the sum of a number and 4."""
    return {
        "example_id": number,
        "prompt": [{"role": "user", "content": f"What is {number}+4?"}],
        "answer": f"\\boxed{{{number + 4}}}",
    }


def ask(client: ClientConfig, model: str, messages: list[dict[str, str]]) -> str:
    """Return the reply of a model."""
    request = urllib.request.Request(
        f"{client.api_base_url}/chat/completions",
        json.dumps({"model": model, "messages": messages}).encode(),
        {
            "Authorization": f"Bearer {os.environ[client.api_key_var]}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])
