"""Every hyper-parameter of every published experiment is the paper's, or says why it is not."""

from __future__ import annotations

import re

import pytest

from docs.writers.experiments import EXPERIMENTS, pages, published_experiments
from mcore_mas.config.compose import expand_braces
from mcore_mas.reports.paper_results import COMPUTED, UNKNOWN, published_values, read_published


@pytest.mark.parametrize("experiment", published_experiments())
def test_hyperparameters_are_the_papers_or_say_why_not(experiment: str) -> None:
    values = published_values(experiment)
    assert set(values) == {*read_published()["hyperparameters"], *COMPUTED}  # what nobody gives is listed as unknown
    different = {name: (value.ours, value.theirs) for name, value in values.items() if value.differs}
    explained = {name for name, value in values.items() if value.reason and value.theirs != UNKNOWN}
    assert set(different) == explained & set(different), f"no reason is given: {different}"
    assert explained == set(different), "a reason is given where nothing differs"


def test_every_value_has_a_source_that_is_described() -> None:
    sources = read_published()["sources"]
    used = [source for family in read_published()["families"] for _, source in family.get("values", {}).values()]
    used += [own["source"] for own in read_published()["hardware"]]
    assert set(used) == set(sources)


def test_a_difference_is_seen_and_an_unknown_is_none() -> None:
    values = published_values("strongermas_t1_sudoku_shared")
    assert values["updates per step"].ours == values["updates per step"].theirs == "mini-batches of 16 rows"
    assert (values["schedule"].ours, values["schedule"].theirs) == ("cosine", "cosine of no length")
    assert values["schedule"].differs and values["schedule"].reason
    assert values["learning rate"].ours == values["learning rate"].theirs == 5e-6
    assert values["seed"].theirs == UNKNOWN and not values["seed"].differs


def test_the_table_of_the_docs_is_current() -> None:
    assert pages() == {EXPERIMENTS: EXPERIMENTS.read_text()}
    evidence = r"^\| `([^`]+)` \|.*\| (?:primary|secondary|no number known) \|"
    rows = re.findall(evidence, EXPERIMENTS.read_text(), flags=re.MULTILINE)
    assert sorted(name for row in rows for name, _ in expand_braces(row)) == sorted(published_experiments())
