"""A run's coach: chosen by its file's name, and every mistake is one line that names it."""

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig


def test_no_coach_unless_chosen() -> None:
    assert resolve(["experiment=demo_math"])["coach"] is None


def test_the_released_behaviour_is_gemini_with_a_fallback() -> None:
    values = resolve(
        ["experiment=demo_math", "coach=mappa", "+coach.judged_with_answer=[verifier]"]
    )
    coach = RunConfig.from_values(values, "here").coach
    assert coach is not None
    assert (coach.provider, coach.model, coach.fallback, coach.retries) == (
        "gemini",
        "gemini-2.5-flash",
        5.0,
        300,
    )
    assert (coach.temperature, coach.observation_chars, coach.earlier_chars) == (0.0, 2000, 500)
    assert coach.judged_with_answer == ("verifier",)
    assert coach.form == "grade"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["coach=local", "+coach.agents=[solvr]"],
            "coach: agents names agent 'solvr', who is not in the team; agents: solver",
        ),
        (
            ["coach=local", "+coach.modle=x"],
            "coach.modle: unknown key; nearest: model",
        ),
        (
            ["coach=local", "coach.url=http://a.org/v1", "+coach.key_variable=K"],
            "http would show the key",
        ),
        (
            ["coach=local", "coach.provider=claude"],
            "unknown provider 'claude'; known: anthropic, gemini, openai",
        ),
        (
            ["reward.name=coach"],
            "reward 'coach' needs a coach; choose one, for example coach=openai",
        ),
        (
            ["coach=gpt"],
            "no coach 'gpt' in the configs; there are: anthropic, deepseek, gemini, local, mappa, openai",
        ),
    ],
)
def test_a_mistake_is_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(["experiment=demo_math", *overrides])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
