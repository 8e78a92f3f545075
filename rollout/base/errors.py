"""Exceptions of the rollout: some fail one trajectory, others end the run."""


class EngineError(RuntimeError):
    """A generation or a weight update failed; the engine keeps its previous weights."""


class PromptTooLong(EngineError):
    """A prompt leaves no tokens for its reply.

    The team is at fault: the trajectory is counted as `overlong`, and as wrong in evaluations.
    """


class ModelError(EngineError, ValueError):
    """A model folder cannot be loaded or trained as configured; the message says what to do."""


class EnvError(RuntimeError):
    """An environment or a tool failed; the trajectory is masked, never scored 0."""


class Undecided(EnvError):
    """An environment cannot score an answer, though the answer is not at fault.

    The trajectory is counted as `undecided`.
    """


class Unasked(EnvError):
    """No trained agent was asked in a trajectory, so that it says nothing about the team.

    The trajectory is counted as `unasked`.
    """


class Defect(EnvError):
    """Code of an orchestra, parser, environment or tool raised an error, which is the cause.

    The trajectory is quarantined (see `rollout.teams.quarantine`) and counted as `quarantined`.
    """


class Unusable(RuntimeError):
    """Something that every trajectory needs is gone, such as a key or a budget: the run ends."""


class OptionsError(ValueError):
    """An object that a config names has other options, or cannot be called as its kind requires."""
