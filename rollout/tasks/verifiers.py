"""Tasks of environments of the package `verifiers`."""

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from pydantic import JsonValue, PositiveInt

from rollout.environments.verifiers import list_tasks
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Task
from rollout.tasks.splits import content_digest, draw_listed, split_of


def verifiers_tasks(
    seed: int,
    sizes: Mapping[str, int],
    *,
    id: str,
    python: str = "",
    args: Mapping[str, JsonValue] | None = None,
    limit: PositiveInt = 10_000,
) -> list[Task]:
    """Draw sizes[split] rows of an environment's data sets for each split.

    Rows for training are from its data set. Rows for validation and test are from its evaluation
    set; without one, about 10 % of the data set belong to each of them.

    Args:
        seed: seed of the run.
        sizes: number of tasks by split.
        id, python, args: options of the environment `verifiers`.
        limit: number of rows that are read of each data set.

    Raises:
        ValueError: the environment cannot be loaded, or a split has too few rows.
    """
    rows = list_tasks(id, python, args or {}, limit)
    owned: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "validation": {}, "test": {}}
    for name in rows:
        for row in rows[name]:
            # The position in its data set does not tell one row from another.
            content = {key: row[key] for key in row if key not in ("example_id", "idx")}
            digest = content_digest(json.dumps(content, sort_keys=True))
            if name == "evaluation":
                split = "validation" if int(digest, 16) % 2 else "test"
            else:
                split = "train" if "evaluation" in rows else split_of(digest)
            owned[split][digest] = row

    tasks = []
    for split, size in sizes.items():
        random = Random(derive_seed(seed, "verifiers", id, split))
        for digest, row in draw_listed(id, split, size, list(owned[split].items()), random):
            tasks.append(
                Task(
                    id=f"{id}/{digest}",
                    prompt=_prompt_text(row.get("prompt")),
                    answers=(json.dumps(row),),
                    env="verifiers",
                    source=id,
                    split=split,
                )
            )
    return tasks


def _prompt_text(prompt: Any) -> str:
    """Return a prompt as text; it is a text or a list of messages."""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") for message in prompt or []]
    return "\n\n".join(content for content in contents if isinstance(content, str))
