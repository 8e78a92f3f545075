"""`mcore-mas explain` prints the credit that an estimator assigns to recorded trajectories."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from mcore_mas.cli.main import app
from mcore_mas.config.compose import resolve
from mcore_mas.credit.samples import CreditError
from mcore_mas.equations.turns import Advantages, Grouping, Turns
from mcore_mas.reports.credit_terminal import print_credit
from rollout.records.files import write_trajectories
from rollout.records.trajectory import Turn
from tests.support.played import failed
from tests.unit.credit.test_samples import trajectory, turn


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file with two trajectories of task t and one of task u.

    In task t, the verifier speaks three times in one trajectory and once in the other.
    """
    trajectories = []
    for sample, rewards in enumerate([[1.0, 5.0, 5.0, 5.0], [0.0, 4.0]]):
        agents = ["solver", *["verifier"] * (len(rewards) - 1)]
        turns = [turn(i, agents[i], reward) for i, reward in enumerate(rewards)]
        trajectories.append(trajectory(sample, 1.0, *turns))
    lone = trajectory(2, 1.0, turn(0, "solver", 1.0))
    trajectories.append(replace(lone, task_id="u", id="0/u/0"))
    path = tmp_path / "step_000000.parquet"
    write_trajectories(path, trajectories)
    return path


def printed_lines(file: Path, estimator: str | None, **options: object) -> list[str]:
    """Return the lines that are printed for an estimator, with single spaces."""
    console = Console(width=160, record=True, file=StringIO())
    print_credit(file, estimator, options, None, 3, console)
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_drmas_shows_an_agents_votes_mean_and_deviation(file: Path) -> None:
    lines = printed_lines(file, "drmas", eps=1e-9)
    assert "peers: compares turns of the same task and agent; each turn has one vote" in lines
    assert "agent verifier │ 5, 5, 5, 4 │ 4 │ 4.75 │ 0.5" in lines
    assert "agent solver │ 1, 0 │ 2 │ 0.5 │ 0.7071" in lines
    assert "0 │ │ 1 │ verifier │ 5 │ 5 │ +0.5000" in lines
    assert "1 │ │ 1 │ verifier │ 4 │ 4 │ -1.5000" in lines
    assert "agent solver │ 1 │ 1 │ 1 │ 0" in lines  # task u: a lone vote
    assert "0 │ │ 0 │ solver │ 1 │ 1 │ +0.0000" in lines


def test_grpo_shows_the_vote_of_each_turn(file: Path) -> None:
    lines = printed_lines(file, "grpo")
    assert "all │ 4, 2 │ 2 │ 3 │ 1.414" in lines
    assert "0 │ │ 3 │ verifier │ 5 │ 4 │ +0.7071" in lines


def test_a_file_without_a_completed_turn_says_so(tmp_path: Path) -> None:
    path = tmp_path / "step_000000.parquet"
    write_trajectories(path, [failed(turn(0, "solver", 1.0)), failed(sample=1)])
    for estimator in ("drmas", None):  # the latter needs no config either
        with pytest.raises(CreditError) as error:
            printed_lines(path, estimator)
        assert str(error.value) == (
            f"{path}: none of its 2 trajectories has a completed turn, so there is no credit to explain; "
            f"`mcore-mas show {path}` shows why they failed"
        )


def test_two_statistics_are_two_tables(file: Path) -> None:
    lines = printed_lines(file, "grpo", std="agent")
    assert "mean: compares turns of the same task; each trajectory has one vote" in lines
    assert "std: compares turns of the same task and agent; each turn has one vote" in lines


def compare_all_turns(turns: Turns) -> Advantages:
    """Estimate advantages as an estimator of a user whose group has no column: all turns of the step."""
    all_turns = Grouping(peer_columns=(), vote_columns=("trajectory", "node", "turn"))
    statistics = all_turns.statistics(turns)
    return Advantages(turns.rewards - statistics.mean, groups={"step": statistics})


def test_a_group_of_all_turns_is_shown(file: Path) -> None:
    lines = printed_lines(file, f"{__name__}:compare_all_turns")
    assert "step: compares all turns; each turn has one vote" in lines
    # Seven rewards with the mean 21 / 7, and σ² = (4 + 4 + 4 + 4 + 9 + 1 + 4) / 6.
    assert "all │ 1, 5, 5, 5, 0, 4 │ 7 │ 3 │ 2.236" in lines


def test_a_token_estimator_shows_the_range_over_the_turns_tokens(file: Path) -> None:
    lines = printed_lines(file, "reinforce_pp", gamma=0.5)
    assert any(line.startswith("0 │ │ 0 │ solver │ 1 │ ") and " … " in line for line in lines)


def test_an_impossible_explanation_is_refused(file: Path) -> None:
    with pytest.raises(
        CreditError, match="no completed turn is of task 'x'; the first task is 't'"
    ):
        print_credit(file, "drmas", {}, "x", 3, Console())
    with pytest.raises(CreditError, match="advantage 'gae' needs values"):
        print_credit(file, "gae", {}, None, 3, Console())
    with pytest.raises(CreditError, match=r"^unknown advantage 'drmass'; nearest: drmas; known: "):
        print_credit(file, "drmass", {}, None, 3, Console())
    with pytest.raises(CreditError, match="advantage 'drmas' has no option 'epsilon'"):
        print_credit(file, "drmas", {"epsilon": 1}, None, 3, Console())


def write_run(folder: Path, trajectories: Path, **sections: object) -> Path:
    """Write the config of a run with these sections and a step's trajectories; return their file."""
    values = resolve(["experiment=demo_math"])
    for agent, advantage in dict(sections.pop("agents", {})).items():  # type: ignore[call-overload]
        values["agents"][agent]["advantage"] = advantage
    values |= sections
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    step = folder / "train/trajectories/step_000000.parquet"
    step.parent.mkdir(parents=True)
    step.write_bytes(trajectories.read_bytes())
    return step


def test_without_a_name_the_estimator_is_that_of_the_run(file: Path, tmp_path: Path) -> None:
    step = write_run(tmp_path, file, advantage={"name": "grpo", "options": {"eps": 1e-9}})
    lines = printed_lines(step, None)
    assert "task t grpo eps=1e-09" in lines
    # The trajectories' votes are 4 and 2: (4 - 3) / 1.414.
    assert "0 │ │ 3 │ verifier │ 5 │ 4 │ +0.7071" in lines
    assert "task t grpo eps=1e-09 ddof=0" in printed_lines(step, None, ddof=0)
    assert "task t drmas" in printed_lines(step, "drmas")
    result = CliRunner().invoke(app, ["explain", str(step)], catch_exceptions=False)
    assert "task t grpo eps=1e-09" in " ".join(result.output.split())
    assert "drmas" not in result.output


def test_a_policys_own_kl_penalties_are_missing(file: Path, tmp_path: Path) -> None:
    policies = resolve(["experiment=demo_math"])["policies"]
    policies["solver"]["overrides"] = {"loss": {"kl": {"coef": 0.1, "where": "reward"}}}
    grpo = {"name": "grpo", "options": {}}
    step = write_run(tmp_path, file, advantage=grpo, policies=policies)
    message = "without the KL penalties of the rewards, which the file does not have"
    assert message in printed_lines(step, None)


def test_agents_with_different_estimators_have_tables_of_their_own(
    file: Path, tmp_path: Path
) -> None:
    verifier = {"name": "drmas", "options": {"eps": 1e-9}}
    grpo = {"name": "grpo", "options": {"eps": 1e-9}}
    step = write_run(tmp_path, file, advantage=grpo, agents={"verifier": verifier})
    lines = printed_lines(step, None)
    assert [line for line in lines if line.startswith("task t")] == [
        "task t grpo eps=1e-09",
        "task t drmas eps=1e-09",
    ]
    assert "0 │ │ 0 │ solver │ 1 │ 4 │ +0.7071" in lines
    # The verifier's votes are 5, 5, 5 and 4: (5 - 4.75) / 0.5.
    assert "0 │ │ 1 │ verifier │ 5 │ 5 │ +0.5000" in lines
    assert sum("│ solver │" in line for line in lines) == 3  # with that of task u


def test_without_a_name_and_a_run_one_line_asks_for_a_name(file: Path, tmp_path: Path) -> None:
    with pytest.raises(CreditError, match="its estimator is unknown; name one with --advantage"):
        printed_lines(file, None)
    step = write_run(tmp_path, file, advantage={"name": "gpgo", "options": {}})
    with pytest.raises(CreditError, match="unknown advantage 'gpgo'"):
        printed_lines(step, None)


def test_a_task_whose_turns_the_filter_drops_is_no_task_without_turns(tmp_path: Path) -> None:
    """The rewards of task t are equal, and those of task u are not."""
    rewards = (("t", 1.0), ("t", 1.0), ("u", 1.0), ("u", 0.0))
    trajectories = [
        replace(
            trajectory(sample, 1.0, turn(0, "solver", reward)),
            task_id=task,
            id=f"0/{task}/{sample}",
        )
        for sample, (task, reward) in enumerate(rewards)
    ]
    file = tmp_path / "step.parquet"
    write_trajectories(file, trajectories)
    step = write_run(tmp_path, file, filter={"name": "informative", "options": {}})
    with pytest.raises(CreditError) as error:
        print_credit(step, None, {}, "t", 3, Console())
    assert str(error.value) == (
        f"{step}: the run's filter drops all turns of task 't', so none has an advantage; name an estimator with "
        "--advantage to see them without the filter"
    )
    with pytest.raises(
        CreditError, match="no completed turn is of task 'x'; the first task is 'u'"
    ):
        print_credit(step, None, {}, "x", 3, Console())


def test_a_config_that_cannot_be_read_is_not_needed_with_a_name(file: Path, tmp_path: Path) -> None:
    step = write_run(tmp_path, file)
    config = tmp_path / "config.yaml"
    config.unlink()
    config.symlink_to("/proc/self/mem")  # a regular file whose first byte not even root can read
    with pytest.raises(CreditError, match=r"cannot be read \(Input/output error\).*--advantage$"):
        printed_lines(step, None)
    assert "task t drmas" in printed_lines(step, "drmas")


def test_the_command_takes_options_and_a_task(file: Path) -> None:
    options = ["--advantage", "drmas", "--option", "lone=raw", "--task", "u"]
    result = CliRunner().invoke(app, ["explain", str(file), *options])
    assert result.exit_code == 0
    assert "task u drmas lone=raw" in " ".join(result.output.split())
    assert "+1.0000" in result.output
    assert "0/t/0" not in result.output
    result = CliRunner().invoke(app, ["explain", str(file), "--option", "lone"])
    assert "--option lone: expected key=value" in str(result.exception)


def test_gigpo_shows_the_discounted_returns_that_its_steps_compare(tmp_path: Path) -> None:
    trajectories = []
    for sample, scores in enumerate([[0.0, 1.0], [2.0, 0.0]]):
        turns = [
            replace(turn(i, "solver", 1.0), round=i, scores={"team": score})
            for i, score in enumerate(scores)
        ]
        trajectories.append(trajectory(sample, 1.0, *turns))
    path = tmp_path / "step_000000.parquet"
    write_trajectories(path, trajectories)
    lines = printed_lines(path, "gigpo", step={"gamma": 0.5})
    # The returns are 1/2 and 1, and 2 and 0. All turns were in the same state.
    assert "state │ 0.5, 1, 2, 0 │ 4 │ 0.875 │ 0.8539" in lines
    keys = ["--option", "step.gamma=0.5", "--option", "step.weight=0", "--option", "lone=raw"]
    result = CliRunner().invoke(
        app, ["explain", str(path), "--advantage", "gigpo", *keys], catch_exceptions=False
    )
    assert "0.5, 1, 2, 0" in result.output


def test_ddof_changes_the_standard_deviation_that_is_printed(file: Path) -> None:
    assert "all │ 4, 2 │ 2 │ 3 │ 1" in printed_lines(file, "grpo", ddof=0)


def test_c3_shows_what_each_alternative_earned_and_what_was_sampled_for_it(tmp_path: Path) -> None:
    def alternative(index: int, agent: str, node: str, outcome: float, sampled: int) -> Turn:
        scores = {
            "replay_outcome": outcome,
            "replay_sampled": float(sampled),
            "replay_recorded": 1.0 - index,
        }
        return replace(turn(index, agent, outcome), node=node, scores=scores)

    replayed = trajectory(
        0,
        3.0,
        turn(0, "solver", 3.0),
        alternative(0, "solver", "1", 7.0, 2),
        alternative(0, "solver", "2", 5.0, 0),
        turn(1, "verifier", 3.0),
        alternative(1, "verifier", "1", 3.0, 0),
    )
    path = tmp_path / "step_000000.parquet"
    write_trajectories(path, [replayed])
    lines = printed_lines(path, "c3")
    assert (
        "replies: compares turns of the same trajectory and turn; each turn has one vote" in lines
    )
    assert "trajectory 0/t/0, turn 0 │ 3, 7, 5 │ 3 │ 5 │ 2" in lines
    assert "0 │ │ 0 │ solver │ 3 │ 3 │ -3.0000 │" in lines
    assert "0 │ 1 │ 0 │ solver │ 7 │ 7 │ +3.0000 │ 2 sampled, 1 repeated" in lines
    assert "0 │ 2 │ 0 │ solver │ 5 │ 5 │ +0.0000 │ 0 sampled, 1 repeated" in lines
    assert "0 │ 1 │ 1 │ verifier │ 3 │ 3 │ +0.0000 │ 0 sampled, 0 repeated" in lines
    assert "reward ┃ vote (replies) ┃ advantage ┃ later turns" in " ".join(lines)
    # An estimator that compares trajectories does not see the alternatives.
    assert "agent solver │ 3 │ 1 │ 3 │ 0" in printed_lines(path, "drmas")
    assert not any("repeated" in line for line in printed_lines(path, "drmas"))


def test_the_value_of_a_turn_by_removal_has_a_column(tmp_path: Path) -> None:
    removed = replace(turn(1, "verifier", 3.0), scores={"removal": 2.5})
    path = tmp_path / "step_000000.parquet"
    write_trajectories(path, [trajectory(0, 3.0, turn(0, "solver", 3.0), removed)])
    lines = printed_lines(path, "c3")
    assert "reward ┃ vote (replies) ┃ advantage ┃ removal" in " ".join(lines)
    assert "0 │ │ 0 │ solver │ 3 │ 3 │ +0.0000 │" in lines
    assert "0 │ │ 1 │ verifier │ 3 │ 3 │ +0.0000 │ +2.5000" in lines
