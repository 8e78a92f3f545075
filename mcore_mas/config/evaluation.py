"""Section of a config about evaluation."""

from pydantic import Field

from rollout.base.section import Section


class EvaluationConfig(Section):
    """Settings of an evaluation on the test tasks; validations use them too, except `samples` and `max_failed`."""

    # k of avg@k, pass@k and maj@k.
    samples: int = Field(4, ge=1)
    # Sampling parameters of all agents; None: each agent's own.
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    # Further attempts at a failed trajectory, with the same seeds.
    retries: int = Field(2, ge=0)
    # Share of the trajectories of an evaluation that may fail in every attempt.
    max_failed: float = Field(0.05, ge=0, le=1)
    # Concurrent trajectories; None: twice engine.slots for each server, and twice the concurrency of each remote model.
    in_flight: int | None = Field(None, ge=1)

    @property
    def sampling(self) -> dict[str, float]:
        """Sampling parameters, by name, that replace those of every agent."""
        return self.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
