"""Runs from which nothing can be learned are refused, and what a run leaves open is chosen so that it learns."""

from pathlib import Path

import pytest
import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.config.credit import truncated_sampling_warning
from mcore_mas.config.experiments import experiments
from mcore_mas.config.run import ConfigError, RunConfig

TREES = ("experiment=demo_path", "recipe=at_grpo")  # one tree for each task
C3 = ("experiment=demo_math", "advantage=c3", "+trainer.replays.alternatives=2")

# Runs from which nothing can be learned, each with a part of its error
NOTHING = [
    (
        ("experiment=demo_math", "advantage=mcts"),
        "compares turns of the same trajectory, parent, with one vote for each",
    ),
    (
        ("experiment=demo_math", "advantage=mars2"),
        "compares turns of the same trajectory, with one vote for each trajectory, node",
    ),
    (
        ("experiment=demo_math", "advantage=at_grpo"),
        "turns of the same task, state, agent, turn, with one vote for each",
    ),
    *(
        ((*TREES, f"advantage.name={name}"), f"advantage '{name}' compares turns of the same task")
        for name in ("grpo", "rloo", "dr_grpo", "grpo_passk")
    ),
    (
        (*TREES, "advantage.name=gigpo"),
        "advantage 'gigpo' needs the rewards of consecutive steps",
    ),
    ((*TREES, "advantage.name=gae"), "advantage 'gae' needs policies.shared.critic"),
    (
        ("experiment=demo_math", "advantage=grpo", "+advantage.options.peers=state"),
        "environment that names its state",
    ),
    (
        ("experiment=demo_path", "advantage.name=at_grpo", "trainer.group_size=1"),
        "an environment that names its state,",
    ),
    (
        (*TREES, "trainer.branching.width=1"),
        "advantage 'at_grpo' compares turns of the same task, state, agent, turn",
    ),
    (
        (*TREES, "filter={name: informative}"),
        "filter 'informative' compares turns of the same task",
    ),
    (
        (*TREES, "filter={name: lowest_spread}"),
        "filter 'lowest_spread' compares turns of the same task",
    ),
    (
        ("experiment=demo_math", "filter={name: informative, options: {by: state}}"),
        "of the same task, state, agent, turn",
    ),
    (
        C3[:2],
        "agent 'solver': advantage 'c3' compares a reply with alternatives, and this run samples none; "
        "set trainer.replays.alternatives",
    ),
    (
        ("experiment=demo_math", C3[2]),
        "trainer.replays samples alternatives for the advantage 'c3', which no trained agent has",
    ),
    (
        (*C3, "+trainer.replays.budget=63", "trainer.tasks_per_step=8", "trainer.group_size=8"),
        "trainer.replays.budget 63 is less than one alternative for each of the 64 trajectories",
    ),
    (
        (*C3, "trainer.branching={width: 2}"),
        "trainer.replays cannot be used with trainer.branching",
    ),
    (
        (*C3, "reward.name=majority"),
        "trainer.replays cannot be used with reward 'majority'; expected 'shared_outcome'",
    ),
    (
        (*C3, "filter={name: informative}"),
        "trainer.replays cannot be used with a filter, because filters choose turns by their rewards",
    ),
    (
        ("experiment=marti_mars2_8b", "advantage.name=c3", "~advantage.options", C3[2]),
        "trainer.replays cannot be used with orchestra 'ab_mcts', which grows its own tree",
    ),
    *(
        (
            ("experiment=demo_math", f"filter={{name: {name}, options: {{ratio: 1.0}}}}"),
            "filter.options.ratio: Input should be less than 1 (got 1.0)",
        )
        for name in ("lowest_mean", "lowest_spread", "outliers")
    ),
    (
        ("experiment=demo_math", "agents.solver.temperature=0"),
        "agent 'solver' is trained and samples at temperature 0",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "message"), NOTHING, ids=[" ".join(case[0]) for case in NOTHING]
)
def test_a_run_that_can_learn_nothing_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_values(resolve(list(overrides)), "test")
    assert message in str(refused.value) and "\n" not in str(refused.value)


OPENENV_TREES = (
    "~experiment",
    "team=openenv",
    "run=trees",
    "+data={generator: arithmetic, train: 4, validation: 1, test: 1}",
    "policy_defaults={model: tiny, lr: 1e-3}",
    "+agents.player.max_tokens=20",
    "+trainer={steps: 2, tasks_per_step: 2, group_size: 2, branching: {width: 3}}",
    "+evaluation={}",
)


def test_trees_that_would_wait_for_each_others_sessions_are_refused() -> None:
    def refusal(*overrides: str) -> str:
        try:
            RunConfig.from_values(resolve([*OPENENV_TREES, *overrides]), "test")
        except ConfigError as error:
            return str(error)
        return ""

    # Four trees that each have two of three branches, and one session more
    assert "width 3 needs 9 sessions of OpenEnv, and env.options allow 1: " in refusal()
    assert "raise env.options.sessions (or servers), or" in refusal()
    # A server that runs already is the only one.
    with_url = refusal("+env.options.url='http://host:8000'", "+env.options.sessions=8")
    assert "allow 8" in with_url and "raise env.options.sessions, or lower width" in with_url
    assert "allow 8" in refusal("+env.options.sessions=8")
    assert refusal("+env.options.sessions=9") == ""
    assert refusal("+env.options.sessions=3", "+env.options.servers=3") == ""
    assert "needs 17 sessions" in refusal("+env.options.sessions=9", "+trainer.staleness=1")


def test_alpha_of_the_team_and_of_the_branches_are_not_both_set() -> None:
    """The reward would be multiplied by both: 0.5 twice is 0.25."""
    both = [*TREES, "trainer.branching.alpha=0.5", "+reward.options.alpha=0.5"]
    with pytest.raises(
        ConfigError, match=r"reward.options.alpha 0.5 would multiply trainer.branching.alpha 0.5"
    ):
        resolve(both)
    for one in (both[:-1], [*both[:-2], both[-1]]):
        resolve(one)


@pytest.mark.parametrize(
    "overrides",
    [
        TREES,
        (*TREES, "filter={name: informative, options: {by: state}}"),
        (*TREES, "advantage.name=drmas"),  # whose votes are turns
        # trajectories meet in states that the environment names
        ("experiment=demo_path", "advantage.name=at_grpo", "trainer.group_size=4"),
        (
            "experiment=demo_path",
            "filter={name: informative, options: {by: state}}",
            "trainer.group_size=4",
        ),
        # a filter of single turns leaves out no step's reward
        ("experiment=demo_path", "advantage.name=gigpo", "filter={name: outliers}"),
        (
            "experiment=demo_path",
            "advantage.name=gigpo",
            "filter={name: informative, options: {by: state}}",
        ),
        (*TREES, "advantage.name=grpo", "trainer.group_size=2"),
        (*TREES, "advantage.name=grpo", "+advantage.options={peers: state, vote: turn}"),
        ("experiment=demo_math", "advantage=reinforce_pp", "trainer.group_size=1"),
        (*C3, "trainer.group_size=1"),
        # the verifier is compared by trajectories, and the solver by alternatives
        (*C3, "+agents.verifier.advantage.name=grpo"),
        (
            "experiment=demo_math",
            "advantage=grpo",
            "trainer.group_size=1",
            "+advantage.options.lone=raw",
        ),
        ("experiment=demo_math", "agents.solver.temperature=0", "+agents.solver.loss_weight=0"),
        # the frozen verifier's turns are not credited, and need no critic
        (
            "experiment=demo_math",
            "advantage=gae",
            "+policies.solver.critic.lr=1e-3",
            "+agents.verifier.loss_weight=0",
        ),
    ],
    ids=" ".join,
)
def test_a_run_that_can_learn_is_not_refused(overrides: tuple[str, ...]) -> None:
    config = RunConfig.from_values(resolve(list(overrides)), "test")
    assert config.trained


@pytest.mark.parametrize(
    ("overrides", "correction"),
    [
        ((), "none"),
        (("policies.solver.bf16=true",), "tis"),
        (
            ("policies.solver.bf16=true", "agents.solver.loss_weight=0"),
            "none",
        ),  # nothing in bfloat16 trains
        (("policies.solver.bf16=true", "loss.correction.name=none"), "none"),
        (("policies.solver.bf16=true", "loss=icepop"), "icepop"),
        (("engine=sglang", "engine.python=/p"), "tis"),
        (("engine=sglang", "engine.python=/p", "engine.options={dtype: float32}"), "none"),
    ],
)
def test_a_correction_left_open_is_tis_where_something_rounds_to_bfloat16(
    overrides: tuple[str, ...], correction: str, tmp_path: Path
) -> None:
    values = resolve(["experiment=demo_math", *overrides])
    assert values["loss"]["correction"] == {"name": correction, "options": {}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert RunConfig.load(tmp_path / "config.yaml").loss.correction.name == correction


@pytest.mark.slow
def test_the_published_experiments_correct_as_their_papers_do() -> None:
    corrected = set()
    for name in experiments():
        loss = resolve([f"experiment={name}"])["loss"]
        if loss["correction"]["name"] != "none":
            corrected.add(name)
    assert corrected == {name for name in experiments() if name.startswith("marti_mars2")}


def test_bounds_on_agreement_are_named() -> None:
    values = resolve(["experiment=demo_math", "trainer.agreement={mean: 0.05}"])
    assert values["trainer"]["agreement"] == {"mean": 0.05}
    with pytest.raises(ConfigError, match=r"trainer\.agreement"):
        resolve(["experiment=demo_math", "trainer.agreement={median: 0.05}"])


def test_replies_sampled_with_top_p_or_top_k_are_warned_of() -> None:
    def warning(*overrides: str) -> str:
        run = RunConfig.from_values(resolve(["experiment=demo_math", *overrides]), "test")
        return truncated_sampling_warning(run.agents)

    assert warning() == ""
    assert warning("agents.solver.top_p=0.9", "+agents.solver.loss_weight=0") == ""
    assert warning("agents.solver.top_p=0.9", "agents.verifier.top_k=20").startswith(
        "agents solver, verifier train on replies drawn with top_p or top_k: the gradient is that of"
    )
