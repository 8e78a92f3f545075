"""The environment of programming problems: rewards, runs of visible tests, and hidden tests."""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest

from rollout.base.errors import EnvError
from rollout.config.environment import EnvConfig
from rollout.environments import ENVS
from rollout.environments.code import VERDICT_TEXTS, CodeEnv, pack_test, unpack_test
from rollout.environments.fenced_programs import last_program
from rollout.environments.protocol import Step
from rollout.environments.running import Tier
from rollout.records.trajectory import Task
from rollout.sandbox import RunLimits, RunResult, Sandbox, SandboxError, Verdict
from rollout.sandbox.judge import CallTest, StdinTest, Test
from rollout.sandbox.tiers import TIERS

VISIBLE = StdinTest(stdin="1 2\n", expected="3\n")
HIDDEN = [StdinTest(stdin=f"{n} {n}\n", expected=f"{2 * n}\n") for n in (0, 50, 1700)]
RIGHT = "print(sum(map(int, input().split())))"
SMALL = "a, b = map(int, input().split())\nprint(a + b if a < 100 else 0)"  # right on two of three


def code_task(hidden: list[Test], visible: list[Test]) -> Task:
    answers = [pack_test(test, visible=True) for test in visible]
    answers += [pack_test(test, visible=False) for test in hidden]
    return Task(id="t", prompt="Add.", answers=tuple(answers), env="code", source="s", split="test")


def fenced(program: str) -> str:
    return f"So:\n```python\n{program}\n```\n"


def play(
    sandbox: Sandbox, *actions: str, task: Task | None = None, **options: object
) -> list[Step]:
    task = task or code_task(HIDDEN, [VISIBLE])
    env = CodeEnv(task, sandbox=sandbox, **options)  # type: ignore[arg-type]

    async def steps() -> list[Step]:
        assert env.reset(task) == "Add."
        return [await env.step(action) for action in actions]

    return asyncio.run(steps())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "reward", "rate_reward", "metrics"),
    [
        (fenced(RIGHT), 1.0, 1.0, {"pass_rate": 1.0, "solved": 1.0, "answered": 1.0}),
        (fenced(SMALL), 0.0, 2 / 3, {"pass_rate": 2 / 3, "solved": 0.0, "answered": 1.0}),
        (fenced("1 / 0"), 0.0, 0.0, {"pass_rate": 0.0, "solved": 0.0, "answered": 1.0}),
        ("print(3)", 0.0, 0.0, {"pass_rate": 0.0, "solved": 0.0, "answered": 0.0}),
    ],
)
def test_rewards(
    box: Sandbox, action: str, reward: float, rate_reward: float, metrics: dict[str, float]
) -> None:
    (step,) = play(box, action)
    assert (step.reward, step.done, step.observation) == (reward, True, "")
    assert step.metrics == metrics | {"tests": 3.0, "runs": 0.0}
    assert step.answer == (last_program(action) or "").strip()
    assert play(box, action, reward="rate")[0].reward == rate_reward


def test_the_tests_with_the_longest_inputs_are_used_first(box: Sandbox) -> None:
    (step,) = play(box, fenced(SMALL), max_tests=1, reward="rate")
    assert (step.reward, step.metrics["tests"]) == (0.0, 1.0)  # only "1700 1700"


def test_a_run_shows_visible_tests_only(box: Sandbox) -> None:
    tried, again, scored = play(
        box,
        f"<run>{fenced('print(4)')}</run>",
        f"<run>\n{fenced(RIGHT)}</run>",
        fenced(RIGHT),
        max_tests=2,
    )
    assert tried.observation == "Test 1: wrong answer\nInput: 1 2\nExpected: 3\nOutput: 4"
    assert (tried.reward, tried.done) == (0.0, False)
    assert tried.metrics == {"runs": 1.0, "visible_rate": 0.0}
    assert [(call.tool, call.query, call.result) for call in tried.tools] == [
        ("run", "print(4)\n", tried.observation)
    ]
    assert again.observation == "Test 1: passed"
    assert (scored.reward, scored.metrics["runs"]) == (1.0, 2.0)
    for number in ("50", "100", "1700", "3400"):
        assert number not in tried.observation + again.observation + scored.observation


def test_tags_in_a_program_are_text(box: Sandbox) -> None:
    program = f"{RIGHT}\n'<run>x</run>'"
    tried, scored = play(box, f"<run>\n{fenced(program)}\n</run>", fenced(program))
    assert (tried.observation, tried.tools[0].query) == ("Test 1: passed", f"{program}\n")
    assert (scored.reward, scored.done) == (1.0, True)


def test_calls(box: Sandbox) -> None:
    task = code_task([CallTest(function="add", arguments=(20, 22), accepted=(42,))], [])
    (step,) = play(box, fenced("class Solution:\n    def add(self, a, b): return a + b"), task=task)
    assert step.reward == 1.0
    (tried,) = play(box, "<run>x</run>", task=task)
    assert tried.observation == "There are no visible tests."


def test_a_case_that_is_no_json_or_too_deep_counts_as_failed(box: Sandbox) -> None:
    task = code_task([CallTest(function="double", arguments=(1,), accepted=(2,))], [])
    env = CodeEnv(task, sandbox=box)
    env.reset(task)
    cases = [("[4]", "8"), ("four", "8"), ("[" * 100_000, "8"), ("[5]", "[" * 100_000)]
    step = asyncio.run(env.check("def double(n):\n    return 2 * n\n", cases))
    assert step.metrics == {"check_rate": 1 / 4}


def test_without_hidden_tests_the_visible_ones_count(box: Sandbox) -> None:
    assert play(box, fenced(RIGHT), task=code_task([], [VISIBLE]))[0].reward == 1.0


class Failing:
    async def run(
        self, source: str, *, stdin: str | bytes = b"", limits: RunLimits | None = None, **_: object
    ) -> RunResult:
        raise SandboxError("gone")


def test_a_failed_sandbox_is_an_error_and_not_a_reward() -> None:
    env = CodeEnv(code_task(HIDDEN, []), sandbox=Failing())
    with pytest.raises(EnvError, match="gone"):
        asyncio.run(env.step(fenced(RIGHT)))
    assert asyncio.run(env.step("no program")).reward == 0.0


@pytest.mark.parametrize(
    ("answers", "message"), [((), "has no tests"), (("42",), "task t: not a test of a program")]
)
def test_tasks_without_tests_are_errors(answers: tuple[str, ...], message: str) -> None:
    task = Task(id="t", prompt="", answers=answers, env="code", source="s", split="test")
    env = CodeEnv(task, sandbox=Failing())
    with pytest.raises(EnvError, match=message):
        asyncio.run(env.step(fenced("1")))


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\nOutput:\n```\nb\n```", "a\n"),
        ("```\na\n```\nand\n```\nb\n```", "b\n"),
        ("```py3\na\n```", "a\n"),
        ("<answer>```python\na\n```</answer>", "a\n"),
        ("\ufeff```python\na\n```\n", "a\n"),
        ("So:\n\u200b```python\na\n```\n", "a\n"),
        ("-\t```python\n\ta\n\t```\n", "a\n"),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("<think>```python\na\n```</think>no", None),
        ("<think>```python\na\n```</think>\n```Python\nb\n```\n", "b\n"),
        ("text", None),
        ("```python\ns = '''```'''\n```", "s = '''```'''\n"),
        ("The sample is\n```text\n4\n```\nand so:\n```python\na\n```\n", "a\n"),
        ("```sh\npip list\n```\n\n```python\na\n```\n```json\n{}\n```\n", "a\n"),
        ("Here:\r\n```python\r\na\r\nb\r\n```\r\n", "a\nb\n"),
        ("1. So:\n\n   ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"),
        ("> ```python\n> a\n> ```\n", "a\n"),
        ("``` python\na\n```\n", "a\n"),
        ("````python\ns = '''\n```\n'''\n````\n", "s = '''\n```\n'''\n"),
        ("~~~python\na\n~~~\n", "a\n"),
        ('```python title="main.py"\na\n```\n', "a\n"),
        ("```{.python .numberLines}\na\n```\n", "a\n"),
        ("<answer>\n```python\na\n```\n</answer>", "a\n"),
        ("```c++\nint a;\n```\n", None),
        ("```pycon\n>>> a\n```\n", None),
    ],
)
def test_last_program(text: str, program: str | None) -> None:
    assert last_program(text) == program


@pytest.mark.parametrize(
    "test", [VISIBLE, CallTest(function="f", arguments=([1], None), accepted=([2], 2))]
)
@pytest.mark.parametrize("visible", [True, False])
def test_packing(test: Test, visible: bool) -> None:
    assert unpack_test(pack_test(test, visible=visible)) == (test, visible)


def test_the_environment_is_chosen_by_name() -> None:
    assert ENVS["code"] is CodeEnv
    EnvConfig(name="code", options={"compare": "floats", "tier": "landlock"})
    with pytest.raises(ValueError, match="no option 'walls'"):
        EnvConfig(name="code", options={"walls": "thick"})


@pytest.mark.parametrize(
    ("env", "option", "value", "message"),
    [
        ("code", "reward", "rtae", r"reward\s+Input should be 'all' or 'rate'"),
        ("code", "compare", "word", r"compare\s+Input should be 'lines', 'tokens' or 'floats'"),
        (
            "math",
            "tier",
            "landlok",
            r"tier\s+Input should be 'auto', 'namespaces', 'landlock' or 'unisolated'",
        ),
        ("plan_path", "tier", "none", r"tier\s+Input should be 'auto'"),
        ("data_science", "reward", "mean", r"reward\s+Input should be 'normalised' or 'gap'"),
        ("repository", "reward", "some", r"reward\s+Input should be 'all' or 'rate'"),
        ("search", "style", "r1", r"style\s+Input should be 'search_r1', 'verl', 'text'"),
        ("code", "server", "box:8080", r"server\s+expected http\(s\)://host/path"),
        ("data_science", "server", "box:8080", r"server\s+expected http\(s\)://host/path"),
    ],
)
def test_a_misspelt_value_is_refused_before_anything_runs(
    env: str, option: str, value: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EnvConfig(name=env, options={option: value})


def test_the_tiers_of_a_config_are_those_of_the_sandbox() -> None:
    assert get_args(Tier) == ("auto", *TIERS)


def test_the_verdicts_have_descriptions() -> None:
    assert set(VERDICT_TEXTS) == set(Verdict) - {Verdict.OK, Verdict.SE}
