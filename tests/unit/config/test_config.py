"""Every shipped config composes, and every mistake is one line that names it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml

from mcore_mas.config.run import CONFIGS, ConfigError, RunConfig, resolve
from rollout.base.section import Section

GROUPS = sorted(
    (path.parent.name, path.stem) for path in CONFIGS.glob("*/*.yaml") if path.parent.name not in ("experiment", "team")
)

TEAMS = sorted(path.stem for path in (CONFIGS / "team").glob("*.yaml"))
VARIANTS = ("_separate", "_partly")
SHARED_TEAMS = [name for name in TEAMS if not name.endswith(VARIANTS)]


def policies_of(team: str) -> dict[str, str]:
    """The policy of each agent of a shipped team, a variant's in place of those that the team itself names."""
    values = yaml.safe_load((CONFIGS / "team" / f"{team}.yaml").read_text())
    return {agent: section["policy"] for agent, section in values["agents"].items()}


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml")))
def test_every_experiment_composes_and_survives_its_file(experiment: str, tmp_path: Path) -> None:
    values = resolve([f"experiment={experiment}"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    assert RunConfig.load(path).run == experiment
    assert RunConfig.load(path).model_dump(mode="json") == values


@pytest.mark.parametrize(("group", "name"), GROUPS)
def test_every_group_file_composes(group: str, name: str) -> None:
    critics = [f"+policies.{policy}.critic.lr=1e-3" for policy in ("solver", "verifier")] if name == "gae" else []
    assert resolve(["experiment=demo_math", f"{group}={name}", *critics])["run"] == "demo_math"


@pytest.mark.parametrize("team", ["graph", "m_ask", "qa_decompose", "qa_evidence", "qa_rewrite"])
def test_every_search_team_composes(team: str) -> None:
    values = resolve(["experiment=demo_search", f"team={team}"])
    shipped = yaml.safe_load((CONFIGS / "team" / f"{team}.yaml").read_text())
    assert values["orchestra"]["name"] == shipped["orchestra"]["name"]
    assert {values["agents"][agent]["policy"] for agent in shipped["agents"]} == {"shared"}


@pytest.mark.parametrize("name", TEAMS)
def test_every_team_composes_with_its_policies(name: str) -> None:
    policies = policies_of(name)
    values = resolve(
        [
            "~experiment",
            f"team={name}",
            "+run=t",
            "+data={generator: arithmetic, train: 1, validation: 1, test: 1}",
            *(f"+policies.{policy}={{model: m, lr: 1e-6}}" for policy in sorted(set(policies.values()))),
            "+trainer={steps: 1, tasks_per_step: 1, group_size: 2}",
            "+evaluation={}",
        ]
    )
    base = yaml.safe_load(
        (CONFIGS / "team" / f"{name.removesuffix('_separate').removesuffix('_partly')}.yaml").read_text()
    )
    assert values["orchestra"]["name"] == base["orchestra"]["name"]
    assert {agent: section["policy"] for agent, section in values["agents"].items()} == policies


@pytest.mark.parametrize("name", SHARED_TEAMS)
def test_every_team_comes_with_shared_separate_and_partly_shared_policies(name: str) -> None:
    agents = list(policies_of(name))
    assert set(policies_of(name).values()) == {"shared"}
    assert (f"{name}_separate" in TEAMS) == (len(agents) > 1)  # a lone agent has nobody to share with
    assert (f"{name}_partly" in TEAMS) == (len(agents) > 2)  # and of two agents none is left out
    if len(agents) > 1:
        separate = policies_of(f"{name}_separate")
        assert list(separate) == agents and len(set(separate.values())) == len(agents)
    if len(agents) > 2:
        partly = policies_of(f"{name}_partly")
        assert list(partly) == agents and 1 < len(set(partly.values())) < len(agents)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sede=2", "unknown key 'sede'; known here: run, results, seed"),
        ("trainer.stesp=3", "unknown key 'trainer.stesp'; known here: steps, tasks_per_step"),
        ("trainr.steps=3", "unknown key 'trainr'; known here: run, results, seed"),
        ("policies.solver.lora.rnk=3", "unknown key 'policies.solver.lora.rnk'; known here: "),
        ("trainer.staleness=1", "'trainer.staleness' has no value that could be overridden; add it with +trainer.stal"),
        ("+trainer.stesp=3", "unknown key 'trainer.stesp'; known here: steps, tasks_per_step"),
        ("policies.solver.lr=fast", "policies.solver.lr: Input should be a valid number"),
        ("agents.solver.policy=solvr", "agent 'solver' plays policy 'solvr', which is not defined; policies: solver"),
        ("orchestra.name=chian", "unknown orchestra 'chian'; known: ab_mcts, chain, "),
        ("+orchestra.options.loops=3", "orchestra 'solver_verifier' has no option 'loops'; its options: max_loops"),
        ("advantage.name=drmass", "unknown advantage 'drmass'; known: at_grpo, dr_grpo, drmas, gae"),
        ("advantage=drmass", "no file 'drmass' in configs/advantage; nearest: drmas, "),
        ("advantage=zzzz", "no file 'zzzz' in configs/advantage; there are: at_grpo, dr_grpo, drmas"),
        ("advantage=gae", "agent 'solver': advantage 'gae' needs policies.solver.critic"),
        ("trainer.group_size=1", "agent 'solver': advantage 'drmas' compares a task's trajectories, but trainer.group"),
        ("+agents.solver.advantage.name=rlo", "unknown advantage 'rlo'; known: at_grpo"),
        ("+advantage.options.epsilon=1", "advantage 'drmas' has no option 'epsilon'; its options: mean, std, eps"),
        ("+advantage.options.lone=rwa", "advantage 'drmas': option lone is 'rwa'; expected one of zero, raw"),
        ("+advantage.options.mean=agnt", "advantage 'drmas': option mean is 'agnt'; expected one of agent, team"),
        ("filter={name: informativ}", "unknown filter 'informativ'; known: informative, lowest_mean"),
        ("+loss.aggregation=seq_mean_token_sum_norm", "aggregation 'seq_mean_token_sum_norm' needs norm"),
        ("+loss.kl.target=0.1", "an adaptive coefficient starts above 0; set coef"),
        ("+loss.correction.name=tsi", "unknown correction 'tsi'; known: icepop, importance"),
        ("+reward.options.alpha=1", "reward 'shared_outcome' has no option 'alpha'; its options: none"),
        (
            "+reward.penalties.overlong={buffer: 4, max_tokens: {solvr: 9}}",
            "max_tokens names agent 'solvr', who is not",
        ),
        ("+data.options.digits=3", "task generator 'arithmetic' has no option 'digits'; its options: none"),
        ("data.generator=null", "data.train is 4000; expected a data file, as no generator is named"),
        ("data.train=x.parquet", "data.train is x.parquet; expected a number of tasks"),
        ("+data.format=dapo", "data.format is dapo, which files have; leave it or data.generator out"),
        ("data.train=[{path: x.json, limt: 5}]", "data.train: a file has limt: Extra inputs are not permitted"),
        (
            "+policies.solver.lora={rank: 4, alpha: 8, targets: [q, w]}",
            "policies.solver.lora.targets.1: Input should",
        ),
        (
            "+policies.solver.lora={rank: 4, alpha: 8, dropout: 0.1}",
            "unknown key 'policies.solver.lora.dropout'",
        ),
        ("+policies.solver.min_lr=1", "policies.solver: min_lr 1.0 is above lr 0.0001; a schedule falls"),
        (
            "+policies.solver={schedule: linear, decay_steps: 10}",
            "policies.solver: schedule 'linear' ends with update 10, but warmup_steps is 10; lower it, or raise decay",
        ),
        (
            "+trainer.alternate={order: [solver, solver]}",
            "trainer.alternate.order is solver, solver; expected every trained policy once: solver, verifier",
        ),
        ("+trainer.final=best", "trainer: final 'best' needs a kept best: set trainer.keep_best to 1 or more"),
        ("experiment=demo_maths", "no file 'demo_maths' in configs/experiment; nearest: demo_math, "),
    ],
)
def test_a_mistake_is_one_line(override: str, message: str) -> None:
    base = [] if override.startswith("experiment") else ["experiment=demo_math"]
    with pytest.raises(ConfigError) as caught:
        resolve([*base, override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("transport", "pool"), [("tensor", "split"), ("distributed", "shared")])
def test_a_push_needs_the_gpus_that_it_is_for(transport: str, pool: str) -> None:
    settings = ["experiment=demo_math", "engine=sglang", f"+engine.transport={transport}"]
    with pytest.raises(ConfigError, match=rf"engine.transport: {transport} .* cluster.pool: {pool}"):
        resolve([*settings, f"+cluster.pool={pool}"])
    other = {"split": "shared", "shared": "split"}[pool]
    assert resolve([*settings, f"+cluster.pool={other}"])["engine"]["transport"] == transport


def test_policies_in_turn_share_the_updates_of_a_run() -> None:
    settings = ["+trainer.alternate={order: [verifier, solver], steps: 2}", "trainer.steps=7"]
    config = RunConfig.check(resolve(["experiment=demo_math", *settings, "+trainer.updates_per_step=3"]), "test")
    assert [config.in_turn(step) for step in range(7)] == [
        *[("verifier",)] * 2,
        *[("solver",)] * 2,
        *[("verifier",)] * 2,
        ("solver",),
    ]
    assert (config.updates_of("verifier"), config.updates_of("solver")) == (4 * 3, 3 * 3)
    together = RunConfig.check(resolve(["experiment=demo_math", "trainer.steps=7"]), "test")
    assert together.in_turn(3) == ("solver", "verifier")
    assert together.updates_of("solver") == 7


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; expected a resolved config"):
        RunConfig.load(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text("run: [")
    with pytest.raises(ConfigError, match="not YAML"):
        RunConfig.load(tmp_path / "config.yaml")


def keys(model: type[Section]) -> Iterator[str]:
    """The names of a section's keys and of the sections below it."""
    for name, field in model.model_fields.items():
        yield name
        below = [field.annotation]
        while below:
            found = below.pop()
            if isinstance(found, type) and issubclass(found, Section):
                yield from keys(found)
            below += get_args(found)


def test_every_key_is_in_the_docs() -> None:
    text = (CONFIGS.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
    written = {name for code in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"\w+", code)}
    assert sorted(set(keys(RunConfig)) - written) == []
