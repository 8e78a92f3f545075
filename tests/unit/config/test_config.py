"""Every shipped config composes, and every mistake is one line that names it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml

from docs.writers.settings import MEANINGS, SETTINGS, pages
from mcore_mas.config.compose import resolve
from mcore_mas.config.experiments import CONFIGS, GROUPS, config_names, experiments
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.config.run_sections import schedule_length
from mcore_mas.equations.advantages import ESTIMATORS
from rollout.base.section import Section
from tests.support.shipped import TEAMS, sharings

_GROUPS_BUT_TEAM = [group for group in (*GROUPS, "recipe") if group != "team"]
CHOICES = [(group, name) for group in _GROUPS_BUT_TEAM for name in config_names(group, [CONFIGS])]
ALONE = [
    "~experiment",
    "run=t",
    "data={generator: arithmetic, train: 1, validation: 1, test: 1}",
    "policy_defaults={model: m, lr: 1e-6}",
    "trainer={steps: 1, tasks_per_step: 1, group_size: 2}",
    "evaluation={}",
    "retriever={}",  # of teams that search
]


@pytest.mark.parametrize("experiment", experiments())
def test_every_experiment_composes_and_survives_its_file(experiment: str, tmp_path: Path) -> None:
    values = resolve([f"experiment={experiment}"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    assert RunConfig.load(path).run == experiment
    assert RunConfig.load(path).model_dump(mode="json") == values


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_of_a_group_composes(group: str, name: str) -> None:
    more: list[str] = []
    if name == "gae":
        more += [f"+policies.{policy}.critic.lr=1e-3" for policy in ("solver", "verifier")]
    if name in ("at_grpo", "mcts", "mars2"):
        more.append("trainer.branching={width: 2}")
    if name == "c3":
        more.append("+trainer.replays.alternatives=2")
    assert resolve(["experiment=demo_math", f"{group}={name}", *more])["run"] == "demo_math"


def test_every_estimator_is_a_choice_of_the_group_advantage() -> None:
    assert set(config_names("advantage", [CONFIGS])) == set(ESTIMATORS)


@pytest.mark.parametrize("team", ["graph", "qa_decompose", "qa_evidence", "qa_rewrite"])
def test_the_search_demo_composes_with_other_teams(team: str) -> None:
    values = resolve(["experiment=demo_search", f"team={team}"])
    assert values["orchestra"]["name"] == TEAMS[team]["orchestra"]["name"]
    assert {values["agents"][agent]["policy"] for agent in TEAMS[team]["agents"]} == {"shared"}


def test_prompts_with_slots_that_the_orchestra_does_not_fill_are_refused() -> None:
    expected = r"agent 'searcher': orchestra 'm_ask' does not fill the slot \{history\}"
    with pytest.raises(ConfigError, match=expected):
        resolve(["experiment=demo_search", "team=m_ask"])


@pytest.mark.parametrize(
    ("team", "sharing"), [(team, sharing) for team in TEAMS for sharing in sharings(team)]
)
def test_every_team_composes_with_its_policies(team: str, sharing: str) -> None:
    values = resolve([*ALONE, f"team={team}", f"sharing={sharing}"])
    agents = list(TEAMS[team]["agents"])
    policies = {agent: section["policy"] for agent, section in values["agents"].items()}
    expected = {
        "shared": dict.fromkeys(agents, "shared"),
        "separate": dict(zip(agents, agents, strict=True)),
    }
    assert policies == expected.get(sharing, TEAMS[team].get("partly"))
    assert list(values["policies"]) == list(dict.fromkeys(policies.values()))
    assert {policy["lr"] for policy in values["policies"].values()} == {1e-6}


@pytest.mark.parametrize("team", TEAMS)
def test_a_team_of_three_or_more_says_how_to_share_partly(team: str) -> None:
    agents = list(TEAMS[team]["agents"])
    partly = TEAMS[team].get("partly")
    assert (partly is not None) == (len(agents) > 2)  # two agents share all policies or none
    if partly is not None:
        assert list(partly) == agents and 1 < len(set(partly.values())) < len(agents)


def test_agents_may_be_given_policies_by_name_and_policies_settings_of_their_own() -> None:
    sharing = "{generator: writer, verifier: judge, refiner: writer}"
    settings = ["policies.judge.lr=0", "policies.judge.tp=2", "agents.verifier.loss_weight=0"]
    values = resolve([*ALONE, "team=chain", f"sharing={sharing}", *settings])
    assert {name: (policy["lr"], policy["tp"]) for name, policy in values["policies"].items()} == {
        "writer": (1e-6, 1),
        "judge": (0, 2),
    }


@pytest.mark.parametrize(
    ("sharing", "policies"),
    [("separate", {"1": 1e-6, "2": 0.5}), ("{1: a, 2: b}", {"a": 1e-6, "b": 1e-6})],
)
def test_names_of_agents_and_policies_may_be_numbers(
    sharing: str, policies: dict[str, float]
) -> None:
    team = [
        "orchestra={name: solver_verifier}",
        "env={name: math}",
        "reward={name: shared_outcome}",
    ]
    agents = "agents={1: {role: solver}, 2: {role: verifier}}"
    policy_2 = ["policies={2: {lr: 0.5}}"] if "2" in policies else []
    values = resolve([*ALONE, *team, agents, f"sharing={sharing}", *policy_2])
    assert [agent["policy"] for agent in values["agents"].values()] == list(policies)
    assert {name: policy["lr"] for name, policy in values["policies"].items()} == policies


def test_an_experiment_without_a_team_has_no_options_of_another() -> None:
    values = resolve([*ALONE, "orchestra={name: single, options: {max_turns: 1}}", "env={name: math}",
                      "reward={name: shared_outcome}", "agents={player: {role: lone_solver}}"])  # fmt: skip
    assert values["orchestra"] == {"name": "single", "options": {"max_turns": 1}}
    assert values["reward"]["penalties"] == {}
    assert list(values["agents"]) == ["player"]


GRID = """
grid:
  t_{one,two}_{a}: {seed: 7}
  t_three: [one, {seed: 8}]
settings:
  one: {trainer: {steps: 1}, defaults: [override /advantage: grpo]}
  two: [one, {trainer: {steps: 2}, defaults: [override /advantage: rloo]}]
  a: {sharing: shared}
defaults: [demo_math]
policy_defaults: {model: m, lr: 1.0e-6}
policies: null
sharing: separate
"""


def test_each_row_of_a_grid_is_an_experiment_and_later_settings_win(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "t.yaml").write_text(GRID)
    assert list(experiments(tmp_path)) == ["t_one_a", "t_two_a", "t_three"]
    rows = {name: resolve([f"experiment={name}"], tmp_path) for name in experiments(tmp_path)}
    assert {
        name: (
            row["run"],
            row["seed"],
            row["trainer"]["steps"],
            row["advantage"]["name"],
            list(row["policies"]),
        )
        for name, row in rows.items()
    } == {
        "t_one_a": ("t_one_a", 7, 1, "grpo", ["shared"]),
        "t_two_a": ("t_two_a", 7, 2, "rloo", ["shared"]),
        "t_three": ("t_three", 8, 1, "grpo", ["solver", "verifier"]),
    }


def test_a_row_whose_name_is_a_number_names_its_run(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "t.yaml").write_text(GRID.replace("t_three", '"123"'))
    assert resolve(["experiment=123"], tmp_path)["run"] == "123"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "{one,two}",
            "{one,tow}",
            "grid row 't_tow_a' names settings 'tow', which the file does not have; it has: one, two, a",
        ),
        ("t_{one,two}_{a}: {seed: 7}\n  t_three: [one, {seed: 8}]", "[t_one]", "grid is "),
        ("t_three:", "3:", "grid is "),
        ("{one,two}_{a}: {seed: 7}", "tow_a: 7", "grid row 't_tow_a' has settings 7; expected"),
        (
            "{one,two}_{a}: {seed: 7}",
            "tow_a: [one, 7]",
            "grid row 't_tow_a' has settings 7; expected",
        ),
        (
            "t_three: [one, {seed: 8}]\nsettings:",
            "t_tow_a:\nsettings:\n  4: {seed: 8}",
            "settings has the name 4, of type int; expected text; write a name such as `4` or `on` in "
            "quotes",
        ),
        (
            "t_three: [one, {seed: 8}]\nsettings:",
            "t_tow_a:\nsettings:\n  on: {seed: 8}",
            "settings has the name True, of type bool; expected text; write a name",
        ),
        ("grid:", "grid: [", "not YAML"),
    ],
)
def test_a_mistake_in_a_grid_is_one_line_with_its_file(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "t.yaml").write_text(GRID.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        resolve(["experiment=t_tow_a"], tmp_path)
    assert message in str(caught.value) and str(tmp_path / "experiment" / "t.yaml") in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sede=2", "sede: unknown key; nearest: seed"),
        ("trainer.stesp=3", "trainer.stesp: unknown key; nearest: steps"),
        ("trainr.steps=3", "trainr: unknown key; nearest: trainer, tracking"),
        ("policies.solver.lora.rnk=3", "policies.solver.lora.rnk: unknown key; nearest: rank"),
        (
            "sharing=seperate",
            "sharing is seperate; expected shared, separate, or the name of a policy for each of solver, verifier",
        ),
        (
            "sharing=partly",
            "sharing is partly; expected shared, separate, or the name of a policy for each of solver, verifier",
        ),
        (
            "sharing={solvr: a}",
            "sharing is {'solvr': 'a'}; expected shared, separate, or the name of a policy for each of solver",
        ),
        (
            "policy_defaults={lr: 1.0e-6} | sharing={solver: [a], verifier: b}",
            "sharing is {'solver': ['a'], 'verifier': 'b'}; expected shared, separate, or the name of a policy",
        ),
        ("policy_defaults=3", "policy_defaults is 3; expected keys of a policy"),
        (
            "policy_defaults={lr: 1.0e-6} | policies.solver=models/Qwen3-4B",
            'policies.solver: Input should be an object (got "models/Qwen3-4B")',
        ),
        (
            "data.validation=[{path: x.json}] | data.validation.limit=20",
            "data.validation.limit: there is a list in this path; write the index of its entry",
        ),
        (
            "data.validation=[{path: x.json}] | data.validation.math.limit=20",
            "data.validation.math.limit: there is a list in this path; write the index of its entry",
        ),
        ("+trainer.stesp=3", "trainer.stesp: unknown key; nearest: steps"),
        (
            "+trainer.logprob_tolerance=1e-3",
            "trainer.logprob_tolerance was removed: bound the figures under trainer.agreement",
        ),
        (
            "policies.solver.lr=fast",
            'policies.solver.lr: Input should be a valid number (got "fast")',
        ),
        (
            "agents.solver.policy=solvr",
            "agent 'solver' plays policy 'solvr', which is not defined; policies: solver, verifier; "
            "nearest: solver; set agents.solver.policy to one of them, define policies.solvr, or take",
        ),
        (
            "team=debate",
            "agent 'debater_1' plays policy 'debater_1', which is not defined; policies: solver, verifier; "
            "set agents.debater_1.policy to one of them, define policies.debater_1, or take",
        ),
        (
            "orchestra.name=chian",
            "unknown orchestra 'chian'; nearest: chain; known: ab_mcts, chain, ",
        ),
        (
            "+orchestra.options.loops=3",
            "orchestra 'solver_verifier' has no option 'loops'; its options: max_loops",
        ),
        (
            "advantage.name=drmass",
            "unknown advantage 'drmass'; nearest: drmas; known: at_grpo, c3, dr_grpo, drmas",
        ),
        ("advantage=drmass", "no advantage 'drmass' in the configs; nearest: drmas, "),
        (
            "advantage=zzzz",
            "no advantage 'zzzz' in the configs; there are: at_grpo, c3, dr_grpo, drmas",
        ),
        ("advantage=gae", "agent 'solver': advantage 'gae' needs policies.solver.critic"),
        (
            "trainer.group_size=1",
            "agent 'solver': advantage 'drmas' compares turns of the same task, agent, with",
        ),
        (
            "+agents.solver.advantage.name=rlo",
            "unknown advantage 'rlo'; nearest: rloo; known: at_grpo",
        ),
        (
            "+advantage.options.epsilon=1",
            "advantage 'drmas' has no option 'epsilon'; its options: peers, vote, b",
        ),
        (
            "+advantage.options.lone=rwa",
            "advantage.options.lone: Input should be 'zero' or 'raw' (got \"rwa\")",
        ),
        (
            "+advantage.options.peers=agnt",
            "advantage.options.peers: Input should be 'task', 'agent' or 'state' (got",
        ),
        (
            "filter={name: informativ}",
            "unknown filter 'informativ'; nearest: informative; known: informative",
        ),
        (
            "+loss.aggregation=seq_mean_token_sum_norm",
            "aggregation 'seq_mean_token_sum_norm' needs norm",
        ),
        ("+loss.kl.target=0.1", "an adaptive coefficient starts above 0; set coef"),
        ("+loss.correction.name=tsi", "unknown correction 'tsi'; nearest: tis; known: icepop"),
        (
            "+reward.options.alpha=1",
            "reward 'shared_outcome' has no option 'alpha'; its options: none",
        ),
        (
            "+reward.penalties.overlong={buffer: 4, max_tokens: {solvr: 9}}",
            "max_tokens names agent 'solvr', who is not",
        ),
        (
            "+data.options.digits=3",
            "task generator 'arithmetic' has no option 'digits'; its options: none",
        ),
        (
            "data.generator=null",
            "data.train is 4000; expected a data file, as no generator is named",
        ),
        ("data.train=x.parquet", "data.train is the file x.parquet; expected a number of tasks"),
        (
            "+data.format=dapo",
            "data.format is dapo, but data.generator makes the tasks; leave one of them out",
        ),
        (
            "data.train=[{path: x.json, limt: 5}]",
            "data.train: a data file has no option 'limt'; its options: path, subset, split, columns, format",
        ),
        (
            "+policies.solver.lora={rank: 4, alpha: 8, targets: [q, w]}",
            "policies.solver.lora.targets.1: Input should be 'q', 'k', 'v', 'o', 'gate', 'up' or 'down'",
        ),
        (
            "+policies.solver.lora={rank: 4, alpha: 8, dropout: 0.1}",
            "policies.solver.lora.dropout: unknown key",
        ),
        (
            "+policies.solver.min_lr=1",
            "policies.solver: min_lr 1.0 is above lr 0.0001, but a schedule only lowers the rate",
        ),
        (
            "+policies.solver={schedule: linear, decay_steps: 10}",
            "policies.solver: schedule 'linear' ends with update 10, but warmup_steps is 10; lower warmup_steps, or "
            "raise decay_steps",
        ),
        (
            "+trainer.alternate={order: [solver, solver]}",
            "trainer.alternate.order is solver, solver; expected every trained policy once: solver, verifier",
        ),
        (
            "+trainer={final: best, keep_best: 0}",
            "trainer: final 'best' needs a checkpoint that is kept for its accuracy: set trainer.keep_best",
        ),
        (
            "experiment=demo_maths",
            "no experiment 'demo_maths' in the configs; nearest: demo_math, ",
        ),
        (
            "cold_start.base.hidden=200",  # 25 for each of 8 heads
            "cold_start.base: hidden 200, heads 8, kv_heads 4: hidden must be an even multiple of heads",
        ),
        ("env=[]", "env: Input should be an object (got [])"),
        ("loss.options=[]", "loss.options: Input should be an object (got [])"),
        (
            "agents=[]",
            "agents: Input should be an object (got [])",
        ),
        (
            "experiment=demo_path | orchestra=banana",
            "env.options.max_turns: ConfigTypeError raised while resolving interpolation: Error trying to access "
            "orchestra.options.max_turns: node `orchestra` is not a container",
        ),
        (
            "experiment=demo_path | orchestra.options.max_turns=five",
            "orchestra.options.max_turns: Input should be a valid integer (got",  # the environment's is this one
        ),
        ("team=null", "no team: orchestra, env, reward missing; choose one by "),
        ("coach=5", "no coach '5' in the configs; there are: anthropic, "),
        ("engine=[]", "engine: Field required"),
        ("team=[mathcat,chain]", "no team 'mathcat' in the configs; nearest: mathchat"),
        (
            "trainer={steps: 3",
            "'trainer={steps: 3' cannot be read; expected KEY=VALUE, brackets closed, and text with ",
        ),
        (
            "run=a=b",
            "text with signs such as = or # in quotes: KEY=\"'a=b'\"",
        ),
        ("seed=1,2", "seed=1,2: expected one value; a list is KEY=[a,b], and text "),
        ("~cold_strat", "~cold_strat: there is no such key to delete; nearest: cold_start"),
        ("~loss.kind", "~loss.kind: there is no such key to delete"),
        (
            "data.validation=[{path: x.json}] | ~data.validation.0",
            "~data.validation.0: an entry of a list cannot be deleted; replace the list",
        ),
        (
            "trainer.keep_best=2 | ~trainer.keep_best=5",
            "~trainer.keep_best=5: the value is 2; write ~trainer.keep_best to delete any value",
        ),
        (
            "policies.solver.model=${reslts}",
            "policies.solver.model: Interpolation key 'reslts' not found",
        ),
        (
            "policies.solver.model=???",
            "policies.solver.model: Missing mandatory value: model",
        ),
        (
            "~team",
            "no team: orchestra, env, reward missing; choose one by `defaults: [override /team: NAME]`",
        ),
        (
            "agents.solvr.max_tokens=5",
            "agent 'solvr' plays policy 'solvr', which is not defined; policies: solver, ver",
        ),
        (
            "agents.solver.policy=verifier | ~policies.solver | agents.solvr.max_tokens=5",
            "which is not defined; policies: verifier; nearest agents: solver; set agents.solvr.policy to",
        ),
        (
            "policies.solvr.lr=1e-4",
            "policy 'solvr' is played by no agent; remove it or name it in agents; nearest: solv",
        ),
        (
            "policies={1: {lr: 1e-4}}",
            "policy '1' is played by no agent; remove it or name it in agents",
        ),
        (
            "agents.solver.policy=null",
            "agents.solver.policy: Input should be a valid string (got null)",
        ),
        (
            "agents.helper={policy: solver}",
            "agents.helper: unknown agent role 'helper'; known: aggregator, ",
        ),
        (
            "agents.helper={policy: solver}",
            "; set agents.helper.role, or import the module that registers this role",
        ),
        (
            "agents.solver.role=slover",
            "agents.solver.role: unknown agent role 'slover'; nearest: solver (or package.module:attribute)",
        ),
        ("data.train='4000'", "data.train is the file 4000; expected a number of tasks"),
        (
            "data.train=4000.0",
            "data.train: Input should be a valid integer, or input should be a valid array (got 4000.0)",
        ),
        (
            "data.train=null",
            "data.train: Input should be a valid integer, or input should be a valid array (got null)",
        ),
        (
            "trainer.agreement={men: 1}",
            "trainer.agreement.men: Input should be 'mean', 'k3', 'p99' or 'max'",
        ),
        (
            "policies.solver.betas=[0.9]",
            "policies.solver.betas.1: Field required",
        ),
        ("trainer=null", "trainer: Input should be an object (got null)"),
        ("~trainer.steps", "trainer.steps: Field required"),
        (
            "env.options.server=banana",
            "env.options.server: expected http(s)://host/path, with a port from 1 to 65535",
        ),
        (
            "retriever={urls: ['http://a:99999']}",
            "retriever.urls.0: expected http(s)://host/path, with a port from 1",
        ),
        (
            "coach=local | coach.url=banana",
            "coach.url: expected http(s)://host/path, with a port from 1 to 65535 if any",
        ),
        (
            "trainer.updates_per_step=17",
            "updates_per_step 17 is more than tasks_per_step 16, and no task is split; lower",
        ),
        (
            "reward.penalties={overlong: {buffer: 41, max_tokens: null}}",
            "penalties.overlong.buffer 41 is more than max_tokens 40 of agent",
        ),
        (
            "reward.penalties={overlong: {buffer: 41}}",
            "penalties.overlong.buffer 41 is more than max_tokens 40 of agent",
        ),
        (
            "tracking.uri=localhost:5000",
            "tracking.uri: 'localhost:5000' is not a store of MLflow; expected http(s)://HOST",
        ),
        (
            "tracking.uri=",
            "tracking.uri: '' is not a store of MLflow; expected http(s)://HOST:PORT or sqlite:///FILE",
        ),
        (
            "tracking.uri=http://",
            "tracking.uri: 'http://' is not a store of MLflow; expected http(s)://HOST:PORT",
        ),
        ("tracking.tags={'owner@lab': me}", "tracking.tags"),
        (
            "experiment=demo_path | cold_start.options.slips={planer: 0.5}",
            "slips names agent 'planer', who is not in the",
        ),
        (
            "coach=openai | coach.key_variable=''",
            "coach.key_variable: String should have at least 1 character (got",
        ),
        (
            "coach=openai | coach.model=''",
            "coach.model: String should have at least 1 character (got",
        ),
        (
            "coach=openai | coach.budget.calls=0",
            "coach.budget.calls: Input should be greater than or equal to 1 (got 0)",
        ),
        (
            "cold_start.options.foo=1",
            "cold_start.options: the demonstration function of task generator 'arithmetic' has",
        ),
    ],
)
def test_a_mistake_is_one_line(override: str, message: str) -> None:
    base = [] if override.startswith("experiment") else ["experiment=demo_math"]
    with pytest.raises(ConfigError) as caught:
        resolve([*base, *override.split(" | ")])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"# \xe9\n", "is not in UTF-8: 'utf-8' codec can't decode byte 0xe9"),
        (
            b"defaults: x",
            "experiment/mine.yaml: defaults is x; expected a list such as [override /team: chain]",
        ),
        (
            b"defaults: [override /teem: chain]",
            "experiment/mine.yaml: 'override /teem' in defaults; expected `override /GROUP: NAME` with one of",
        ),
        (b"defaults: [override /team: chian]", "no team 'chian' in the configs; nearest: chain"),
        (b"defaults: [[demo_math]]", "experiment/mine.yaml: '['demo_math']' in defaults; expected"),
        (
            b"grid: {mine: {defaults: [demo_math]}}",
            "or, at the top level of an experiment's file, the name of another experiment",
        ),
        (b"defaults: [demo_math]\n3: 4", "3: unknown key; known here: run, results, "),
        (b"day: 2024-13-01", "mine.yaml has a value that cannot be converted: month must be in"),
        (
            b"",
            "no team: orchestra, env, reward, agents missing; choose one by `defaults: [override /team: NAME]`",
        ),
    ],
)
def test_a_mistake_in_an_own_experiment_is_one_line(
    text: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        resolve(["experiment=mine"], tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "starts"),
    [
        ("deterministic=true", False),
        ("options.disable-prefill-cuda-graph=true", True),
        ("options.cuda_graph_backend_prefill=full", True),
        ("options={cuda-graph-config: {prefill: {backend: disabled}}}", True),
        ("options={cuda-graph-config: {decode: {max_bs: 64}}}", False),
        ("sleep=false", True),
    ],
)
def test_a_server_that_frees_its_graphs_in_sleep_makes_none_of_prompts(
    option: str, starts: bool
) -> None:
    graphs = "+engine.environment.SGLANG_MEMORY_SAVER_CUDA_GRAPH='1'"
    settings = [
        "experiment=demo_math",
        "engine=sglang",
        graphs,
        "+engine.sleep=true",
        f"++engine.{option}",
    ]
    if starts:
        resolve(settings)
    else:
        with pytest.raises(ConfigError, match=r"set options\.disable-prefill-cuda-graph"):
            resolve(settings)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "tp_size=2",
            "engine.options: tp-size is not to be given to the servers; set engine.tp instead",
        ),
        (
            "enable-dp-attention=true",
            "SGLang removes it after 2026; set attn-dp-size instead",
        ),
        ("model=x", "engine.options: model is not to be given to the servers; the engine sets it"),
        (
            "mem-fraction-statik=0.5",
            "has no argument 'mem-fraction-statik'; nearest: mem-fraction-static; `sglang.launch",
        ),
        (
            "mem-fraction-static=lots",
            "engine.options: mem-fraction-static: expected a number or null (got 'lots')",
        ),
        (
            "disable-cuda-graph=1",
            "engine.options: disable-cuda-graph: expected true or false or null (got 1)",
        ),
        (
            "decode-log-interval=true",
            "engine.options: decode-log-interval: expected an integer or null (got True)",
        ),
    ],
)
def test_arguments_of_sglangs_servers_are_known_by_name_and_type(option: str, message: str) -> None:
    settings = [
        "experiment=demo_math",
        "engine=sglang",
        "engine.options={mem_fraction_static: 1, device: cpu}",
    ]
    assert resolve(settings)["engine"]["options"] == {"mem_fraction_static": 1, "device": "cpu"}
    with pytest.raises(ConfigError) as caught:
        resolve([*settings, f"engine.options.{option}"])
    assert message in str(caught.value)


@pytest.mark.parametrize(("transport", "pool"), [("tensor", "split"), ("distributed", "shared")])
def test_a_push_needs_the_gpus_that_it_is_for(transport: str, pool: str) -> None:
    settings = ["experiment=demo_math", "engine=sglang", f"+engine.transport={transport}"]
    with pytest.raises(
        ConfigError, match=rf"engine.transport: {transport} .* cluster.pool: {pool}"
    ):
        resolve([*settings, f"+cluster.pool={pool}"])
    other = {"split": "shared", "shared": "split"}[pool]
    assert resolve([*settings, f"+cluster.pool={other}"])["engine"]["transport"] == transport


def test_policies_in_turn_share_the_updates_of_a_run() -> None:
    settings = ["+trainer.alternate={order: [verifier, solver], steps: 2}", "trainer.steps=7"]
    config = RunConfig.from_values(
        resolve(["experiment=demo_math", *settings, "+trainer.updates_per_step=3"]), "test"
    )
    assert [config.in_turn(step) for step in range(7)] == [
        *[("verifier",)] * 2,
        *[("solver",)] * 2,
        *[("verifier",)] * 2,
        ("solver",),
    ]
    assert (schedule_length(config, "verifier"), schedule_length(config, "solver")) == (
        4 * 3,
        3 * 3,
    )
    together = RunConfig.from_values(resolve(["experiment=demo_math", "trainer.steps=7"]), "test")
    assert together.in_turn(3) == ("solver", "verifier")
    assert schedule_length(together, "solver") == 7


@pytest.mark.parametrize(
    ("overrides", "checkpoints"),
    [
        ([], 1),
        (["trainer.final=best"], 1),
        (["data.validation=0"], 0),
        (["trainer.keep_best=0"], 0),
        (["trainer.keep_best=3"], 3),
    ],
)
def test_the_best_checkpoint_is_kept_where_there_are_validation_tasks(
    overrides: list[str], checkpoints: int
) -> None:
    config = RunConfig.from_values(resolve(["experiment=demo_math", *overrides]), "test")
    assert config.keep_best == checkpoints


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; expected a resolved config"):
        RunConfig.load(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text("run: [")
    with pytest.raises(ConfigError, match="not YAML"):
        RunConfig.load(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").symlink_to("/proc/self/mem")  # its first byte cannot be read
    with pytest.raises(ConfigError, match=r"cannot be read \(Input/output error\)"):
        RunConfig.load(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"slots: [", "not YAML .*engine/mine.yaml"),
        (b"# \xe9\n", "engine/mine.yaml: not YAML .*is not in UTF-8"),
        (b"slots: &loop [*loop]", "engine/mine.yaml: not YAML .*nested deeper than 100"),
        (b"3", "engine/mine.yaml: holds a value of type int; expected a mapping of keys"),
        (b"embedded", "engine/mine.yaml: holds a value of type str; expected a mapping of keys"),
        (b"- embedded", "engine/mine.yaml: holds a value of type list; expected a mapping of keys"),
        (b"defaults: 3", "Invalid defaults list in 'engine/mine'.*with a list as its defaults"),
        (b"defaults: [sglnag]", "In 'engine/mine': Could not load 'engine/sglnag'"),
    ],
)
def test_a_mistake_in_a_file_of_a_group_is_one_line(
    text: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "mine.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=f"^configs/ with .*: .*{message}") as caught:
        resolve(["experiment=demo_math", "engine=mine"], tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"engine: &loop [*loop]", "not YAML .*nested deeper than 100"),
        (b"tiny", "holds a value of type str; expected a mapping of keys"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_line(text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=f"recipe/mine.yaml: {message}") as caught:
        resolve(["experiment=demo_math", "recipe=mine"], tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"3", b"# \xe9\n", b"seed: &loop [*loop]"])
def test_a_config_yaml_that_cannot_be_loaded_is_one_line(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(
        ConfigError, match=r"config\.yaml or a config .* cannot be loaded"
    ) as caught:
        resolve(["experiment=demo_math"], tmp_path)
    assert "\n" not in str(caught.value)


def test_a_link_to_a_missing_experiment_is_named(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    lock = tmp_path / "experiment" / ".#mine.yaml"  # as Emacs makes while mine.yaml is not saved
    lock.symlink_to("user@host.1234")
    with pytest.raises(ConfigError, match=r"\.#mine\.yaml: .*No such file.*; remove it"):
        experiments(tmp_path)


def test_a_key_that_only_has_a_default_in_the_code_is_set_like_any_other() -> None:
    overrides = ["trainer.staleness=1", "+trainer.oversample=1.5", "advantage.options.lone=raw"]
    values = resolve(["experiment=demo_math", *overrides])
    assert (values["trainer"]["staleness"], values["trainer"]["oversample"]) == (1, 1.5)
    assert values["advantage"]["options"] == {"lone": "raw"}
    values = resolve(
        ["experiment=demo_math", "engine={max_length: 64, slots: 8}", "agents.solver.max_tokens=8"]
    )
    # The other settings of the section are those of the group's config.
    assert (values["engine"]["name"], values["engine"]["slots"]) == ("embedded", 8)


def test_a_mapping_replaces_a_list() -> None:
    overrides = [
        "data.validation=[{path: a.json}, {path: b.json}]",
        "data.validation={path: c.json}",
    ]
    values = resolve(["experiment=drmas_t1_4b_shared_grpo", *overrides])
    assert [file["path"] for file in values["data"]["validation"]] == ["c.json"]


def test_a_key_is_deleted_with_its_value_or_without_one() -> None:
    for override in ("~trainer.checkpoint_every", "~trainer.checkpoint_every=7"):
        values = resolve(["experiment=demo_math", "trainer.checkpoint_every=7", override])
        assert values["trainer"]["checkpoint_every"] == 10  # the default


def keys(model: type[Section]) -> Iterator[str]:
    """Yield the names of the keys of a section and of the sections below it."""
    for name, field in model.model_fields.items():
        yield name
        annotations = [field.annotation]
        while annotations:
            annotation = annotations.pop()
            if isinstance(annotation, type) and issubclass(annotation, Section):
                yield from keys(annotation)
            annotations += get_args(annotation)


def test_every_key_is_in_the_page_of_settings() -> None:
    page = pages()[SETTINGS]
    written = {
        name
        for key in re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
        for name in key.split(".")
    }
    sections = {name.partition(".")[0] for name in re.findall(r"^## (\S+)", page, re.MULTILINE)}
    assert sorted(set(keys(RunConfig)) - written - sections) == []
    assert re.findall(r"^\| `([^`]+)` \|.*\|  \|$", page, re.MULTILINE) == []  # without a meaning


def test_meanings_are_of_keys_that_exist() -> None:
    page = pages()[SETTINGS]
    for name in MEANINGS:
        section, _, key = name.partition(".")
        heading = {"run": "Top level", "file": "Data files"}.get(section, section)
        table = re.split(rf"^## {heading}\b", page, flags=re.MULTILINE)[1].partition("\n## ")[0]
        assert f"| `{key}` |" in table, name


def test_own_configs_replace_shipped_ones_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "gspo.yaml").write_text("{name: gspo, aggregation: token_mean}\n")
    (tmp_path / "loss" / "near.yaml").write_text("name: ppo_clip\n")
    base = ["experiment=demo_math", "loss=gspo"]
    assert resolve(base)["loss"]["aggregation"] == "seq_mean_token_mean"
    assert resolve(base, tmp_path)["loss"]["aggregation"] == "token_mean"

    values = resolve(["experiment=demo_math", "loss=near", "recipe=dapo"], tmp_path)
    assert values["loss"]["options"]["clip_high"] == 0.28
    with pytest.raises(ConfigError, match="no loss 'nearer' in the configs; nearest: near"):
        resolve(["experiment=demo_math", "loss=nearer"], tmp_path)


def test_a_changed_config_is_composed_again(tmp_path: Path) -> None:
    (tmp_path / "loss").mkdir()
    overrides = ["experiment=demo_math", "loss=mine"]
    for entropy in (0.25, 0.5):
        file = tmp_path / "loss" / "mine.yaml"
        file.write_text(f"{{name: ppo_clip, entropy: {entropy}}}\n")
        assert resolve(overrides, tmp_path)["loss"]["entropy"] == entropy


def test_a_recipe_is_applied_after_the_experiment_and_before_overrides(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "defaults: [override /loss: gspo]\ntrainer: {steps: 7, group_size: 3}\n"
    )
    values = resolve(["experiment=demo_math", "recipe=mine", "trainer.group_size=4"], tmp_path)
    assert values["loss"]["name"] == "gspo"
    assert (values["trainer"]["steps"], values["trainer"]["group_size"]) == (7, 4)


def test_the_settings_of_a_grid_are_a_mapping(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "list.yaml").write_text("grid: {mine: short}\nsettings: [short]\n")
    with pytest.raises(
        ConfigError, match=r"list\.yaml: settings is \['short'\]; expected a mapping"
    ):
        resolve(["experiment=mine"], tmp_path)


def test_partly_names_a_policy_for_each_agent() -> None:
    expected = (
        r"partly is \{'solver': 'a'\}; expected the name of a policy for each of solver, verif"
    )
    with pytest.raises(ConfigError, match=expected):
        resolve(["sharing=partly", "partly={solver: a}"])


def test_an_experiment_that_begins_with_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "demo_math.yaml").write_text("defaults: [demo_math]\n")
    with pytest.raises(ConfigError, match="cannot include themselves: demo_math -> demo_math"):
        resolve(["experiment=demo_math"], tmp_path)


def test_settings_of_a_grid_that_include_themselves_are_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "loop.yaml").write_text(
        "grid: {mine: [short]}\nsettings: {short: [long], long: short}\n"
    )
    with pytest.raises(ConfigError, match="cannot include themselves: short -> long -> short"):
        resolve(["experiment=mine"], tmp_path)


@pytest.mark.parametrize("name", ["../up", ".", "", "a b", "x" * 101])
def test_names_of_runs_policies_and_agents_are_names_of_folders(name: str) -> None:
    values = resolve(["experiment=demo_math"])
    with pytest.raises(ConfigError, match="run: String should"):
        RunConfig.from_values({**values, "run": name}, "a config")

    solver = values["agents"]["solver"]
    policies = {name: values["policies"]["solver"], "verifier": values["policies"]["verifier"]}
    agents = {"solver": {**solver, "policy": name}, "verifier": values["agents"]["verifier"]}
    with pytest.raises(ConfigError, match=r"policies.*String should"):
        RunConfig.from_values({**values, "agents": agents, "policies": policies}, "a config")

    agents = {name: {**solver, "role": "solver"}, "verifier": values["agents"]["verifier"]}
    with pytest.raises(ConfigError, match=r"agents.*String should"):
        RunConfig.from_values({**values, "agents": agents}, "a config")
