"""Teachers of on-policy distillation: they score the tokens that their students have sampled."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mcore_mas.config.run import RunConfig
from mcore_mas.credit.samples import Sample
from mcore_mas.runtime.errors import TrainingError
from rollout.base.errors import EngineError
from rollout.engines import ScoredReply, ScoringEngine
from rollout.records.grouping import group_pairs

# Replies of one call to an engine. The engine samples nothing for later steps meanwhile.
_REPLIES_PER_CALL = 64


class Teachers:
    """Scores of the teachers of a run; a policy without a teacher gets none."""

    def __init__(self, config: RunConfig, engines: Mapping[str, ScoringEngine]) -> None:
        """Name the engines or remote models of the policies that teach.

        Args:
            config: config of the run.
            engines: what scores for each policy; those that do not teach may be among them.

        Raises:
            TrainingError: the engine of a teacher, one of the user's own, cannot score.
        """
        self._config = config
        self._engines = engines
        for student, teacher in config.teachers.items():
            engine = engines[teacher.policy]
            if not hasattr(engine, "score"):
                raise TrainingError(
                    f"policies.{student}.teacher: the engine {type(engine).__name__} of "
                    f"'{teacher.policy}' has no method `score`; add it (see ScoringEngine), or use "
                    "embedded or sglang"
                )

    async def score(self, samples: Sequence[Sample], students: Collection[str]) -> list[Sample]:
        """Return the samples, with their teacher's log-probabilities where a student trains on them.

        Args:
            samples: samples of a step.
            students: policies that are trained in the step.

        Raises:
            TrainingError: a teacher has not scored a reply.
        """
        result = list(samples)
        indices_by_student = group_pairs(
            (sample.policy, index)
            for index, sample in enumerate(samples)
            if sample.policy in students and self._learns(sample)
        )
        for student, indices in indices_by_student.items():
            scores = await self._score_all(student, [samples[index] for index in indices])
            for index, logprobs in zip(indices, scores, strict=True):
                result[index] = replace(samples[index], teacher=tuple(logprobs))
        return result

    def _learns(self, sample: Sample) -> bool:
        """Return True if a policy learns from its teacher on a sample."""
        has_loss = sample.trained_tokens > 0 and self._config.agents[sample.agent].loss_weight > 0
        return has_loss and sample.policy in self._config.teachers

    async def _score_all(self, student: str, samples: Sequence[Sample]) -> list[list[float]]:
        teacher = self._config.teachers[student].policy
        engine = self._engines[teacher]
        replies = [
            ScoredReply(
                prompt_ids=sample.prompt_ids,
                completion_ids=sample.completion_ids,
                temperature=sample.temperature,
            )
            for sample in samples
        ]
        parts = [
            replies[start : start + _REPLIES_PER_CALL]
            for start in range(0, len(replies), _REPLIES_PER_CALL)
        ]
        try:
            scored_parts = await asyncio.gather(*(engine.score(part) for part in parts))
        except EngineError as error:
            raise TrainingError(
                f"policies.{student}: its teacher '{teacher}' gave no log-probabilities: {error}"
            ) from error
        return [logprobs for part in scored_parts for logprobs in part]
