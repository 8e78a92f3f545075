"""Aliases of `mcore-mas serve`: further names of a run's models."""

from __future__ import annotations

import pytest
import typer

from mcore_mas.cli.runs import parse_aliases
from mcore_mas.config.run import ConfigError
from mcore_mas.evaluation.serve import check_aliases

MODELS = ["demo_math", "solver", "verifier"]


def test_pairs_of_names_are_aliases() -> None:
    aliases = parse_aliases(["gpt-4o=solver", "maker/x=y=demo_math"])
    assert aliases == {"gpt-4o": "solver", "maker/x=y": "demo_math"}
    check_aliases(aliases, MODELS)


@pytest.mark.parametrize("pair", ["gpt-4o", "=solver", "gpt-4o="])
def test_a_pair_without_both_names_is_refused(pair: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"'{pair}' is not NAME=AGENT"):
        parse_aliases([pair])


@pytest.mark.parametrize(
    ("aliases", "error"),
    [
        (
            {"gpt-4o": "coder"},
            "--alias gpt-4o=coder: there is no model 'coder'; models: demo_math, solver, verifier",
        ),
        (
            {"solver": "verifier"},
            "--alias solver=verifier: 'solver' is a model of the run already",
        ),
    ],
)
def test_an_alias_must_be_a_new_name_of_a_model(aliases: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        check_aliases(aliases, MODELS)
