"""Teachers of on-policy distillation: they score the tokens that their students have sampled."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from mcore_mas.config.run import RunConfig
from mcore_mas.config.run_sections import for_policy
from mcore_mas.credit.samples import Sample
from mcore_mas.runtime.errors import TrainingError
from rollout.base.errors import EngineError
from rollout.engines import ScoredReply, ScoringEngine
from rollout.models.chat_template import Renderer
from rollout.records.grouping import group_pairs
from rollout.records.trajectory import Task

# Replies of one call to an engine. The engine samples nothing for later steps meanwhile.
_REPLIES_PER_CALL = 64


class Teachers:
    """Scores of the teachers of a run; a policy without a teacher gets none."""

    def __init__(
        self,
        config: RunConfig,
        engines: Mapping[str, ScoringEngine],
        renderers: Mapping[str, Renderer],
        note: Callable[[str], None],
    ) -> None:
        """Check that the engines and remote models that teach can score.

        Args:
            config: config of the run.
            engines: engines and scorers of remote models, by policy; not all of them need to teach.
            renderers: renderer of each student whose teacher reads a context.
            note: called with lines for the log.

        Raises:
            TrainingError: a teacher's engine, which the user has written, has no method `score`.
        """
        self._config = config
        self._engines = engines
        self._renderers = renderers
        self._note = note
        for student, teacher in config.teachers.items():
            engine = engines[teacher.policy]
            if not hasattr(engine, "score"):
                raise TrainingError(
                    f"policies.{student}.teacher: the engine {type(engine).__name__} of "
                    f"'{teacher.policy}' has no method `score`; add it (see ScoringEngine), or use "
                    "embedded or sglang"
                )

    async def score(
        self, samples: Sequence[Sample], students: Collection[str], tasks: Mapping[str, Task]
    ) -> list[Sample]:
        """Return the samples, with their teacher's log-probabilities where a student trains on them.

        A reply that is longer than the teacher's `max_length`, together with its prompt and the context,
        gets none. The log says how many there are.

        Args:
            samples: samples of a step.
            students: policies that are trained in the step.
            tasks: tasks of the samples, by id.

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
            replies = {index: self._reply(samples[index], tasks) for index in indices}
            fitting = [index for index in indices if self._fits(student, replies[index])]
            if len(fitting) < len(indices):
                self._note(
                    f"policies.{student}.teacher: {len(indices) - len(fitting)} of {len(indices)} replies are too "
                    "long for the teacher with its context, and are not scored; raise "
                    f"policies.{self._config.teachers[student].policy}.overrides.engine.max_length"
                )
            scores = await self._score_all(student, [replies[index] for index in fitting])
            for index, logprobs in zip(fitting, scores, strict=True):
                result[index] = replace(samples[index], teacher=tuple(logprobs))
        return result

    def _learns(self, sample: Sample) -> bool:
        """Return True if a policy learns from its teacher on a sample."""
        has_loss = sample.trained_tokens > 0 and self._config.agents[sample.agent].loss_weight > 0
        return has_loss and sample.policy in self._config.teachers

    def _reply(self, sample: Sample, tasks: Mapping[str, Task]) -> ScoredReply:
        """Return the reply of a sample, with the prompt that its teacher reads."""
        prompt_ids = sample.prompt_ids
        context = self._config.teachers[sample.policy].context
        if context is not None:
            answers = tasks[sample.task].answers
            text = context.format(answer=answers[0] if answers else "")
            prompt_ids = self._renderers[sample.policy].prepend_context(text, prompt_ids)
        return ScoredReply(
            prompt_ids=prompt_ids,
            completion_ids=sample.completion_ids,
            temperature=sample.temperature,
        )

    def _fits(self, student: str, reply: ScoredReply) -> bool:
        """Return True if the teacher's engine takes a reply of this length, or the teacher is a remote model."""
        teacher = self._config.teachers[student].policy
        if self._config.policies[teacher].remote is not None:
            return True
        max_length = for_policy(self._config, teacher).engine.max_length
        return len(reply.prompt_ids) + len(reply.completion_ids) <= max_length

    async def _score_all(self, student: str, replies: Sequence[ScoredReply]) -> list[list[float]]:
        teacher = self._config.teachers[student].policy
        engine = self._engines[teacher]
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
