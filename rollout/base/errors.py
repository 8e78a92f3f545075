"""Exceptions of the rollout: some fail one trajectory, others end the run."""


class EngineError(RuntimeError):
    """A generation or a weight update failed.

    After a failed update, the replies of an engine may be unreliable until another update has
    succeeded (see `TrainedEngine.commit_update`).
    """


class PromptTooLong(EngineError):
    """A prompt leaves no tokens for its reply.

    The team is at fault: the trajectory is counted as `overlong`, and as wrong in evaluations.
    """


class ModelError(EngineError, ValueError):
    """A model folder cannot be loaded or trained as configured; the message says what to do."""


class EnvError(RuntimeError):
    """An environment or a tool failed; the trajectory is masked instead of scored with 0."""


class Undecided(EnvError):
    """An environment cannot score an answer, though the answer is not at fault.

    The trajectory is counted as `undecided`. If an agent gives too many such answers, they are scored
    with 0 (see `judge_undecided`).
    """


class Unscorable(EnvError):
    """A task has no answers by which its environment could score an action.

    A served team ends such a task without a score, because the answers of its tasks are not known.
    """


class Unasked(EnvError):
    """No trained agent was asked in a trajectory, so the trajectory says nothing about the team.

    It is counted as `unasked`.
    """


class Defect(EnvError):
    """Code of an orchestra, parser, environment or tool raised an error, which is the `__cause__`.

    The trajectory is quarantined (see `rollout.teams.quarantine`) and counted as `quarantined`.
    """


class Unusable(RuntimeError):
    """Something that every trajectory needs is gone, such as a key or a budget: the run ends."""


class OptionsError(ValueError):
    """An object that a config names has other options, or cannot be called as its kind requires."""
