"""Teachers of policies that a config may name."""

from __future__ import annotations

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.config.run_sections import for_policy

FROZEN = "+policies.teacher={model: big}"
TEACHER = "+policies.solver.teacher={policy: teacher}"
REMOTE = "+policies.teacher={remote: {model: big, url: 'http://localhost:8000/v1'}}"


def compose(*settings: str) -> RunConfig:
    return RunConfig.from_values(resolve(["experiment=demo_math", *settings]), "test")


def test_a_teacher_needs_no_agent_and_is_not_trained() -> None:
    config = compose(FROZEN, TEACHER)
    assert config.trained == config.played == ("solver", "verifier")
    assert config.models["teacher"] == "big"
    assert config.teachers["solver"].policy == "teacher"
    assert config.teachers["solver"].coef == 1


def test_the_engine_of_a_frozen_teacher_may_take_more_tokens_than_a_micro_batch() -> None:
    config = compose(FROZEN, TEACHER, "+policies.teacher.overrides.engine.max_length=4608")
    assert config.trainer.microbatch_tokens == 4096
    assert for_policy(config, "teacher").engine.max_length == 4608


def test_a_policy_of_the_run_may_teach_another() -> None:
    config = compose("+policies.solver.teacher={policy: verifier, alone: true}")
    assert config.teachers["solver"].alone


def test_a_policy_with_a_context_may_be_its_own_teacher() -> None:
    config = compose("+policies.solver.teacher={policy: solver, context: 'Answer: {answer}'}")
    assert config.teachers["solver"].policy == "solver"


def test_a_policy_that_learns_from_its_teacher_alone_needs_no_groups() -> None:
    alone = [
        "+policies.solver.teacher={policy: teacher, alone: true}",
        "+policies.verifier.teacher={policy: teacher, alone: true}",
    ]
    assert compose(FROZEN, *alone, "trainer.group_size=1").trainer.group_size == 1
    with pytest.raises(
        ConfigError, match=r"agent 'verifier': .* no trajectories or branches to compare"
    ):
        compose(FROZEN, alone[0], "trainer.group_size=1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([FROZEN], "policy 'teacher' is played by no agent"),
        ([TEACHER], "teacher.policy is 'teacher'; expected another policy of the run: verifier"),
        (
            [FROZEN, "+policies.solver.teacher={policy: teacher, context: '{solution}'}"],
            "expected a text whose only name in braces is {answer}",
        ),
        (
            [FROZEN, "+policies.solver.teacher={policy: teacher, context: '{answer[text]}'}"],
            "expected a text whose only name in braces is {answer}",
        ),
        (
            ["+policies.solver.teacher={policy: solver}"],
            "teacher.policy is 'solver' itself; expected another policy of the run: verifier; or give the teacher a "
            "context",
        ),
        (
            ["+policies.solver.teacher={policy: absent}"],
            "expected another policy of the run: verifier; define policies.absent with its model or remote",
        ),
        (
            [FROZEN, TEACHER, "+agents.solver.loss_weight=0"],
            "policies.solver.teacher: nothing trains this policy",
        ),
        ([FROZEN, "+policies.solver.teacher={policy: teacher, coef: 0}"], "greater than 0"),
        (
            [FROZEN, TEACHER, "+policies.teacher.overrides.engine.max_length=100"],
            "the engine of 'teacher' takes 100 tokens, and that of 'solver'",
        ),
        (
            [FROZEN, TEACHER, "+engine.grammar=true"],
            "policies.solver.teacher: engine.grammar changes the probabilities",
        ),
        (
            [REMOTE, TEACHER, "+agents.solver.temperature=0.7"],
            "agent 'solver' samples at 0.7; set agents.solver.temperature: 1",
        ),
        (
            ["+policies.teacher={remote: {model: big}}", TEACHER],
            "expected provider openai and the url of a server",
        ),
        (
            [REMOTE, TEACHER, "+policies.teacher.remote.budget.calls=9"],
            "remote.budget: a teacher's scores are not counted against a budget; leave it out",
        ),
    ],
)
def test_teachers_that_cannot_score_are_refused_in_one_line(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        compose(*settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("teacher", "ending"),
    [
        (REMOTE, "set agents.solver.temperature: 1"),  # a remote model has no engine to change
        (
            "+policies.teacher={model: big, overrides: {engine: {name: sglang, python: python}}}",
            "set agents.solver.temperature: 1, or give 'teacher' the engine embedded",
        ),
    ],
    ids=["remote", "sglang"],
)
def test_the_embedded_engine_is_advised_only_to_teachers_with_an_engine(
    teacher: str, ending: str
) -> None:
    with pytest.raises(ConfigError) as error:
        compose(teacher, TEACHER, "+agents.solver.temperature=0.7")
    assert str(error.value).endswith(ending)
