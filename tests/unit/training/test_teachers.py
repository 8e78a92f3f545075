"""Teachers that score the sampled tokens of a step."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.credit.assign import add_teacher_advantages
from mcore_mas.credit.samples import Sample
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.players import (
    check_teacher_contexts,
    check_teacher_tokenizers,
    make_renderers,
)
from mcore_mas.training.teachers import Teachers
from rollout.base.errors import EngineError
from rollout.engines import ScoredReply, ScoringEngine
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.records.trajectory import Task
from tests.support.run_folder import make_run
from tests.support.templates import renderer_of

SETTINGS = (
    "+policies.teacher={model: '${policies.solver.model}'}",
    "+policies.solver.teacher={policy: teacher}",
)
SAMPLE = Sample(
    policy="solver",
    agent="solver",
    task="t",
    trajectory="t/0",
    turn=0,
    prompt_ids=(5, 6, 7),
    completion_ids=(8, 9),
    temperature=0.5,
    behaviour=(-1.0, -1.0),
)


class CountingEngine(ScoringEngine):
    """Engine whose scores are the negative token ids, and that counts the replies of its calls."""

    def __init__(self, error: str = "") -> None:
        self.sizes: list[int] = []
        self._error = error

    async def score(self, replies: Sequence[ScoredReply]) -> list[list[float]]:
        if self._error:
            raise EngineError(self._error)
        self.sizes.append(len(replies))
        return [[-float(token) for token in reply.completion_ids] for reply in replies]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("results"), *SETTINGS)


def test_a_model_scores_its_own_tokens_as_it_samples_them(run: Path) -> None:
    """The scores are those of the embedded engine, at the sample's temperature."""
    config = RunConfig.load(run / "config.yaml")
    engine = LocalEngine(EmbeddedEngine.from_folder(run / "base", max_length=64))
    reply = ScoredReply(prompt_ids=(5, 6, 7), completion_ids=(8, 9), temperature=0.5)

    async def score() -> tuple[list[Sample], list[list[float]]]:
        teachers = Teachers(config, {"teacher": engine}, {}, print)
        return await teachers.score([SAMPLE], ["solver"], {}), await engine.score([reply])

    (scored,), (expected,) = asyncio.run(score())
    assert scored == replace(SAMPLE, teacher=tuple(expected))


def test_only_what_a_student_trains_on_is_scored(run: Path) -> None:
    config = RunConfig.load(run / "config.yaml")
    engine = CountingEngine()
    samples = [
        SAMPLE,
        replace(SAMPLE, policy="verifier", agent="verifier"),  # has no teacher
        replace(SAMPLE, trained=(False, False)),  # is masked
    ]
    teachers = Teachers(config, {"teacher": engine}, {}, print)
    scored = asyncio.run(teachers.score(samples, ["solver", "verifier"], {}))
    assert [sample.teacher for sample in scored] == [(-8.0, -9.0), None, None]
    # In a step that trains the verifier alone
    assert asyncio.run(teachers.score(samples, ["verifier"], {})) == samples
    assert engine.sizes == [1]


def test_a_step_is_scored_in_several_calls(run: Path) -> None:
    config = RunConfig.load(run / "config.yaml")
    engine = CountingEngine()
    samples = [replace(SAMPLE, completion_ids=(token,)) for token in range(150)]
    teachers = Teachers(config, {"teacher": engine}, {}, print)
    scored = asyncio.run(teachers.score(samples, ["solver"], {}))
    assert [sample.teacher for sample in scored] == [(-float(token),) for token in range(150)]
    assert sorted(engine.sizes) == [22, 64, 64]


def test_a_teacher_that_does_not_score_is_one_line(run: Path) -> None:
    config = RunConfig.load(run / "config.yaml")
    teachers = Teachers(config, {"teacher": CountingEngine(error="out of memory")}, {}, print)
    message = "policies.solver: its teacher 'teacher' gave no log-probabilities: out of memory"
    with pytest.raises(TrainingError, match=message):
        asyncio.run(teachers.score([SAMPLE], ["solver"], {}))
    with pytest.raises(TrainingError, match="engine object of 'teacher' has no method `score`"):
        Teachers(config, {"teacher": object()}, {}, print)  # type: ignore[dict-item]


class CopyingEngine(ScoringEngine):
    """Engine to which a token of the prompt has the probability 1/2, and any other token 1/8."""

    def __init__(self) -> None:
        self.prompts: list[Sequence[int]] = []

    async def score(self, replies: Sequence[ScoredReply]) -> list[list[float]]:
        self.prompts += [reply.prompt_ids for reply in replies]
        return [
            [
                math.log(1 / 2 if token in reply.prompt_ids else 1 / 8)
                for token in reply.completion_ids
            ]
            for reply in replies
        ]


TASK = Task(id="t", prompt="6 * 7", answers=("42",), env="math", source="s", split="train")
CONTEXT = (
    "+policies.solver.teacher={policy: solver, alone: true, context: 'The answer is {answer}.'}"
)


def test_a_policy_learns_from_itself_with_the_answer_before_its_prompt(tmp_path: Path) -> None:
    config = RunConfig.load(make_run(tmp_path, CONTEXT) / "config.yaml")
    renderer = renderer_of("qwen2.5", tmp_path / "bytes")
    prompt = "<|im_start|>user\n6 * 7<|im_end|>\n<|im_start|>assistant\n"
    sample = replace(
        SAMPLE,
        prompt_ids=renderer.encode_reply(prompt),
        completion_ids=renderer.encode("48"),  # one token is in the answer, and one is not
        behaviour=(math.log(1 / 4), math.log(1 / 4)),
        advantages=(9.0, 9.0),
    )
    engine = CopyingEngine()
    teachers = Teachers(config, {"solver": engine}, {"solver": renderer}, print)
    scored = asyncio.run(teachers.score([sample], ["solver"], {"t": TASK}))
    (read,) = engine.prompts
    assert renderer.decode_raw(read) == f"<|im_start|>system\nThe answer is 42.<|im_end|>\n{prompt}"
    # log 1/2 - log 1/4 and log 1/8 - log 1/4; the student's own prompt stays as it was.
    (credited,) = add_teacher_advantages(scored, config.teachers)
    assert credited.advantages == pytest.approx((math.log(2), -math.log(2)))
    assert credited.prompt_ids == sample.prompt_ids


def test_a_reply_that_is_too_long_behind_the_context_does_not_learn_from_the_teacher(
    tmp_path: Path,
) -> None:
    config = RunConfig.load(make_run(tmp_path, CONTEXT, "engine.max_length=70") / "config.yaml")
    renderer = renderer_of("qwen2.5", tmp_path / "bytes")
    context_ids = renderer.prepend_context("The answer is 42.", ())
    longest_prompt = 70 - len(context_ids) - len(SAMPLE.completion_ids)
    longest = replace(SAMPLE, prompt_ids=(5,) * longest_prompt, advantages=(1.0, 1.0))
    too_long = replace(longest, turn=1, prompt_ids=(5,) * (longest_prompt + 1))
    notes: list[str] = []
    teachers = Teachers(config, {"solver": CopyingEngine()}, {"solver": renderer}, notes.append)
    scored = asyncio.run(teachers.score([longest, too_long], ["solver"], {"t": TASK}))
    assert [sample.teacher is None for sample in scored] == [False, True]
    (note,) = notes
    assert "1 of 2 replies are too long for the teacher with its context" in note
    credited = add_teacher_advantages(scored, config.teachers)
    assert credited[1].advantages == (0.0, 0.0)  # it learns from its teacher alone


def test_a_template_without_system_messages_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, CONTEXT)
    config = RunConfig.load(run / "config.yaml")
    check_teacher_contexts(config, make_renderers(config, config.models))
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    settings = json.loads((run / "base" / "tokenizer_config.json").read_text())
    file = run / "base" / "chat_template.jinja"
    text = file.read_text() if file.is_file() else settings["chat_template"]
    file.write_text(template + text)
    renderers = make_renderers(config, config.models)
    message = "policies.solver.teacher.context: .*base: the chat template does not write a system"
    with pytest.raises(ConfigError, match=message):
        check_teacher_contexts(config, renderers)


def test_a_teacher_with_other_token_ids_is_refused(run: Path, tmp_path: Path) -> None:
    config = RunConfig.load(run / "config.yaml")
    check_teacher_tokenizers(config, make_renderers(config, config.models))

    other = tmp_path / "other"
    shutil.copytree(run / "base", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    renderers = make_renderers(config, {**config.models, "teacher": other})
    with pytest.raises(ConfigError, match=r"policies.solver.teacher: token '[ab]' is \d+ in the"):
        check_teacher_tokenizers(config, renderers)
