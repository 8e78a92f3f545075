"""Workloads of published experiments match counts by hand."""

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.planning.workload import estimate_workloads


def config(experiment: str, *overrides: str) -> RunConfig:
    return RunConfig.from_values(resolve([f"experiment={experiment}", *overrides]), experiment)


def test_two_agents_with_two_loops() -> None:
    workload = estimate_workloads(config("drmas_t1_4b_shared_drmas"))["shared"]
    assert workload.turns == 32 * 8 * 2 * 2  # tasks, trajectories of each, agents, loops
    assert workload.reply_tokens == 4096 / 2
    assert workload.prompt_tokens == 8192 / 4
    assert workload.tokens == 1024 * 4096


def test_prompts_of_a_policy_are_as_long_as_its_own_engine_allows() -> None:
    settings = ["engine.max_length=512", "+policies.verifier.overrides.engine.max_length=256"]
    workloads = estimate_workloads(config("demo_math", *settings))
    assert workloads["solver"].prompt_tokens == (512 - 40) / 4
    assert workloads["verifier"].prompt_tokens == (256 - 24) / 4


def test_branches_of_a_tree() -> None:
    """Two agents with a policy each play eight branches in each of five turns."""
    workloads = estimate_workloads(config("strongermas_t1_plan_path_separate"))
    assert workloads["tool"].turns == 32 * 8 * 5
    assert workloads["planner"].turns == 32 * 8 * 5


def test_alternatives_of_a_turn() -> None:
    """The solver's turns have three alternatives each, the verifier's none."""
    values = resolve(
        [
            "experiment=demo_math",
            "agents.solver.advantage.name=c3",
            "+trainer.replays.alternatives=3",
        ]
    )
    workloads = estimate_workloads(RunConfig.from_values(values, "test"))
    assert workloads["solver"].turns == 16 * 8 * 2 * 4
    assert workloads["verifier"].turns == 16 * 8 * 2


def test_nodes_of_a_search_tree_are_shared_by_the_agents() -> None:
    workloads = estimate_workloads(config("marti_mars2_8b"))
    assert workloads["generator_1"].turns == 16 * 8 / 2


def test_a_teacher_whom_no_agent_plays_has_no_turns() -> None:
    teachers = ["+policies.frozen={model: m}", "+policies.solver.teacher={policy: frozen}"]
    assert set(estimate_workloads(config("demo_math", *teachers))) == {"solver", "verifier"}
