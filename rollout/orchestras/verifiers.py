"""Program that plays environments of the package `verifiers`; see `rollout.environments.verifiers`."""

from rollout.environments.verifiers import run_episode
from rollout.orchestras.program import Job


async def play(job: Job) -> str:
    """Play an episode of the environment that the job's problem names; return its result."""
    return await run_episode(job.problem, job.task.answers[0], url=job.openai_url, key=job.key)
