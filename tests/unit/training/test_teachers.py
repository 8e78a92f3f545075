"""Teachers that score the sampled tokens of a step."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.credit.samples import Sample
from mcore_mas.runtime.errors import TrainingError
from mcore_mas.runtime.players import check_teacher_tokenizers, make_renderers
from mcore_mas.training.teachers import Teachers
from rollout.base.errors import EngineError
from rollout.engines import ScoredReply, ScoringEngine
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from tests.support.run_folder import make_run

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
        teachers = Teachers(config, {"teacher": engine})
        return await teachers.score([SAMPLE], ["solver"]), await engine.score([reply])

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
    teachers = Teachers(config, {"teacher": engine})
    scored = asyncio.run(teachers.score(samples, ["solver", "verifier"]))
    assert [sample.teacher for sample in scored] == [(-8.0, -9.0), None, None]
    # In a step that trains the verifier alone
    assert asyncio.run(teachers.score(samples, ["verifier"])) == samples
    assert engine.sizes == [1]


def test_a_step_is_scored_in_several_calls(run: Path) -> None:
    config = RunConfig.load(run / "config.yaml")
    engine = CountingEngine()
    samples = [replace(SAMPLE, completion_ids=(token,)) for token in range(150)]
    scored = asyncio.run(Teachers(config, {"teacher": engine}).score(samples, ["solver"]))
    assert [sample.teacher for sample in scored] == [(-float(token),) for token in range(150)]
    assert sorted(engine.sizes) == [22, 64, 64]


def test_a_teacher_that_does_not_score_is_one_line(run: Path) -> None:
    config = RunConfig.load(run / "config.yaml")
    teachers = Teachers(config, {"teacher": CountingEngine(error="out of memory")})
    message = "policies.solver: its teacher 'teacher' gave no log-probabilities: out of memory"
    with pytest.raises(TrainingError, match=message):
        asyncio.run(teachers.score([SAMPLE], ["solver"]))
    with pytest.raises(TrainingError, match="engine object of 'teacher' has no method `score`"):
        Teachers(config, {"teacher": object()})  # type: ignore[dict-item]


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
