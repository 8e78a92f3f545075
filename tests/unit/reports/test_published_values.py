"""Every hyper-parameter of every published experiment is the paper's, or says why it is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from fnmatch import fnmatch
from functools import reduce
from operator import getitem
from typing import Any

import pytest

from docs.writers.experiments import EXPERIMENTS, pages, published_experiments
from mcore_mas.config.compose import resolve
from mcore_mas.config.experiments import expand_braces
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.reports.published_values import (
    COMPUTED,
    UNKNOWN,
    compared_values,
    published_values,
    read_published,
)


@pytest.mark.parametrize("experiment", published_experiments())
def test_hyperparameters_are_the_papers_or_say_why_not(experiment: str) -> None:
    values = published_values(experiment)
    assert set(values) == {
        *read_published()["hyperparameters"],
        *COMPUTED,
    }  # what nobody gives is listed as unknown
    different = {
        name: (value.ours, value.theirs) for name, value in values.items() if value.differs
    }
    explained = {name for name, value in values.items() if value.reason and value.theirs != UNKNOWN}
    assert set(different) == explained & set(different), f"no reason is given: {different}"
    assert explained == set(different), "a reason is given where nothing differs"


# Numbers of a recipe that no paper has, or that change nothing of what is learned
POLICY_KEYS = ("tp", "dp", "pp", "cp", "ep", "vpp", "spike_factor", "critic.warmup_steps")
TRAINER_KEYS = (
    "branching.alpha",
    "checkpoint_every",
    "group_size",  # the paper's is 1; with trees their width is compared
    "keep_*",
    "max_advantage",
    "microbatch_tokens",
    "oversample",
    "signal_within",
    "staleness",
    "validate_every",
    "validation_samples",
    "watch.*",
)
OURS = (
    "agents.*.loss_weight",
    "agents.*.chats.*",
    "coach.*",
    "evaluation.max_failed",
    "evaluation.retries",
    "env.workers",
    "env.options.max_turns",
    "env.options.max_tests",
    "reward.options.gamma",
    "filter.resample",
    "loss.kl.horizon",
    *(f"policies.*.{key}" for key in POLICY_KEYS),
    *(f"trainer.{key}" for key in TRAINER_KEYS),
)
RECIPE = (
    "orchestra",
    "agents",
    "policies",
    "reward",
    "advantage",
    "filter",
    "loss",
    "trainer",
    "evaluation",
    "env",
    "coach",
)


def numbers(values: Any, *keys: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the keys and the value of every number in nested values."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from numbers(value, *keys, key)
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield keys, values


ONE_OF_EACH = [
    "unitymas_t4_code_4b",
    "marti_mars2_8b",
    "marti_debate_qwen",
    "strongermas_t1_sudoku_shared",
    "drmas_t2_3b_shared_drmas",
    "mappa_mathchat",
]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ONE_OF_EACH)
def test_no_number_of_a_recipe_changes_unseen(experiment: str) -> None:
    values = resolve([f"experiment={experiment}"])
    before = compared_values(RunConfig.from_values(values, experiment))
    unseen = set()
    recipe = {section: values[section] for section in RECIPE if values.get(section)}
    for keys, number in numbers(recipe):
        key = ".".join(keys)
        if keys[0] in ("agents", "policies"):
            key = ".".join((keys[0], "*", *keys[2:]))
        if any(fnmatch(key, name) for name in OURS):
            continue
        # The first of these numbers that the config accepts replaces the number.
        for other in {number * 2 or 1, number / 2, number - 1} - {number}:
            changed = deepcopy(values)
            reduce(getitem, keys[:-1], changed)[keys[-1]] = type(number)(other)
            with suppress(ConfigError):
                if compared_values(RunConfig.from_values(changed, experiment)) == before:
                    unseen.add(key)
                break
    assert not unseen, "name these in docs/published.yaml, or above"


def test_every_value_has_a_source_that_is_described() -> None:
    sources = read_published()["sources"]
    used = [
        source
        for family in read_published()["families"]
        for _, source in family.get("values", {}).values()
    ]
    used += [entry["source"] for entry in read_published()["hardware"]]
    assert set(used) == set(sources)


def test_a_difference_is_seen_and_an_unknown_is_none() -> None:
    values = published_values("strongermas_t1_sudoku_shared")
    assert (
        values["updates per step"].ours
        == values["updates per step"].theirs
        == "mini-batches of 16 rows"
    )
    assert (values["schedule"].ours, values["schedule"].theirs) == ("cosine", "cosine of no length")
    assert values["schedule"].differs and values["schedule"].reason
    assert values["learning rate"].ours == values["learning rate"].theirs == 5e-6
    assert values["seed"].theirs == UNKNOWN and not values["seed"].differs


def test_a_loss_without_clips_has_none() -> None:
    config = deepcopy(resolve(["experiment=demo_math"]))
    config["loss"] = {**config["loss"], "name": "reinforce", "options": {}}
    values = compared_values(RunConfig.from_values(config, "demo_math"))
    assert [values[name] for name in ("lower clip", "upper clip", "dual clip")] == [None] * 3


def test_the_page_has_a_row_for_every_published_experiment() -> None:
    page = pages()[EXPERIMENTS]
    evidence = r"^\| `([^`]+)` \|.*\| (?:primary|secondary|no number known) \|"
    rows = re.findall(evidence, page, flags=re.MULTILINE)
    assert sorted(name for row in rows for name, _ in expand_braces(row)) == sorted(
        published_experiments()
    )
