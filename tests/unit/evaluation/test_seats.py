"""Seats of an evaluation: the model that plays each agent."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.evaluation.seats import config_with_seats, parse_seats, player_names
from rollout.base.ownership import FolderError

AGENTS = ("solver", "verifier")


def write_trained_run(results: Path, run: str) -> None:
    """Write config.yaml and done.json of a run with models named after it."""
    models = [f"policies.{policy}.model=models/{run}-{policy}" for policy in AGENTS]
    settings = [f"results={results}", f"run={run}", "cold_start=null", *models]
    folder = results / run
    (folder / "train").mkdir(parents=True)
    config = resolve(["experiment=demo_math", *settings])
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    trained = {policy: f"elsewhere/train/models/{policy}" for policy in AGENTS}
    record = {"policies": trained, "sha256": {policy: {} for policy in AGENTS}}
    (folder / "train" / "done.json").write_text(json.dumps(record))


def models_of(config: RunConfig) -> dict[str, str]:
    """Return the model of each policy, relative to the results if it is in there."""
    return {
        policy: model.removeprefix(f"{config.results}/") for policy, model in config.models.items()
    }


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Return the config of the run `mas`; its results folder also has the run `alone`."""
    for run in ("mas", "alone"):
        write_trained_run(tmp_path, run)
    return RunConfig.load(tmp_path / "mas" / "config.yaml")


@pytest.mark.parametrize(
    ("state", "seats", "models"),
    [
        ("base", {}, {"solver": "models/mas-solver", "verifier": "models/mas-verifier"}),
        (
            "trained",
            {},
            {"solver": "mas/train/models/solver", "verifier": "mas/train/models/verifier"},
        ),
        # the training of one agent left out
        (
            "x",
            {"verifier": "base"},
            {"solver": "mas/train/models/solver", "base.verifier": "models/mas-verifier"},
        ),
        # Stronger-MAS, table 3: swapped policies, and agents that were trained in another run
        (
            "swapped",
            {"solver": "mas/verifier", "verifier": "mas/solver"},
            {"mas.verifier": "mas/train/models/verifier", "mas.solver": "mas/train/models/solver"},
        ),
        (
            "from_alone",
            {"solver": "alone", "verifier": "alone"},
            {
                "alone.solver": "alone/train/models/solver",
                "alone.verifier": "alone/train/models/verifier",
            },
        ),
        (
            "x",
            {"solver": {"model": "any"}},
            {"seat.solver.solver": "any", "verifier": "mas/train/models/verifier"},
        ),
    ],
)
def test_each_agent_plays_the_model_of_its_seat(
    config: RunConfig, state: str, seats: dict[str, Any], models: dict[str, str]
) -> None:
    seated = config_with_seats(config, state, seats)
    assert models_of(seated) == models
    assert [seated.agents[agent].policy for agent in AGENTS] == list(models)


def test_one_agent_of_a_shared_policy_can_have_another_model(config: RunConfig) -> None:
    agents = {
        name: agent.model_copy(update={"policy": "solver"}) for name, agent in config.agents.items()
    }
    policies = {"solver": config.policies["solver"]}
    shared = config.model_copy(update={"agents": agents, "policies": policies})
    seated = config_with_seats(shared, "x", {"verifier": "base"})
    assert models_of(seated) == {
        "solver": "mas/train/models/solver",
        "base.solver": "models/mas-solver",
    }


def test_a_model_behind_an_api_can_have_a_seat(config: RunConfig) -> None:
    remote = {"remote": {"model": "big", "url": "http://127.0.0.1:1"}}
    seated = config_with_seats(config, "x", {"verifier": remote})
    assert list(seated.models) == ["solver"]
    assert seated.remotes["seat.verifier.verifier"].model == "big"


@pytest.mark.parametrize(
    ("seats", "message"),
    [
        ({"judge": "base"}, "seat of 'judge', who is not in the team; agents: solver, verifier"),
        ({"solver": "alone/judge"}, "seat of 'solver': run 'alone' has no agent 'judge'"),
        ({"solver": "nobody"}, r"nobody/config.yaml: no such file; expected a resolved config"),
        ({"solver": {}}, "a policy has either a model .* expected base, trained, a run, run/agent"),
        ({}, "state 'x' of .*: expected base or trained$"),
    ],
)
def test_an_invalid_seat_is_refused_in_one_line(
    config: RunConfig, seats: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        config_with_seats(config, "x", seats)
    assert "\n" not in str(error.value)


def test_a_run_of_a_seat_must_have_finished_its_training(config: RunConfig) -> None:
    (config.results / "alone" / "train" / "done.json").unlink()
    with pytest.raises(FolderError, match=r"alone/train/done.json: no such file; train first"):
        config_with_seats(config, "x", {"solver": "alone"})


@pytest.mark.parametrize("second", ["verifier=alone", "verifier=base"])
def test_an_agent_with_several_seats_is_refused_in_one_line(second: str) -> None:
    message = f"--seat verifier=base solver=base {second}: 'verifier' has several seats; expected one for each agent"
    with pytest.raises(ConfigError) as error:
        parse_seats("x", ["verifier=base", "solver=base", second], AGENTS)
    assert str(error.value) == message


@pytest.mark.parametrize("state", ["../up", "x" * 101, ".hidden", "a b", "a/b"])
def test_a_state_that_is_no_name_of_a_file_is_refused(state: str) -> None:
    with pytest.raises(ConfigError, match="expected at most 100 letters"):
        parse_seats(state, ["verifier=base"], AGENTS)
    seats = parse_seats("without_verifier-2.x", ["verifier=base"], AGENTS)
    assert seats == {"verifier": "base"}


@pytest.mark.parametrize(
    ("state", "seats", "names"),
    [
        ("base", {}, ("mas@base", "mas@base")),
        ("trained", {}, ("mas", "mas")),
        ("x", {"verifier": "base"}, ("mas", "mas@base")),
        ("x", {"solver": "alone", "verifier": "alone/solver"}, ("alone", "alone/solver")),
        ("x", {"solver": "alone/solver"}, ("alone", "mas")),
        ("x", {"solver": {"model": "/models/m"}}, ("/models/m", "mas")),
    ],
)
def test_a_model_has_one_name_in_all_evaluations(
    config: RunConfig, state: str, seats: dict[str, Any], names: tuple[str, str]
) -> None:
    assert player_names(config, state, seats) == dict(zip(AGENTS, names, strict=True))
