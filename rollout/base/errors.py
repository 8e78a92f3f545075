"""Exceptions of configs, engines, models, environments and orchestras: which fail one trajectory, and which a run."""


class EngineError(RuntimeError):
    """A generation or a weight update failed; the engine keeps its old weights."""


class PromptTooLong(EngineError):
    """A prompt leaves no room for its reply, the team's own doing: counted as `overlong`, and wrong when measured."""


class ModelError(EngineError, ValueError):
    """A model folder cannot be computed or trained as asked: says what, where, expected, what to do."""


class EnvError(RuntimeError):
    """An environment or one of its tools failed: the trajectory is masked, never scored 0."""


class Undecided(EnvError):
    """An environment cannot say what an answer is worth, through no fault of the answer's; counted as `undecided`."""


class Defect(EnvError):
    """Code of an orchestra, parser, environment or tool raised what it should not; its cause is that error.

    The trajectory is quarantined (see `rollout.teams.quarantine`) and counted as `quarantined`.
    """


class Unusable(RuntimeError):
    """What every trajectory needs is gone for good, such as a key or a budget: this ends the run."""


class OptionsError(ValueError):
    """Something that a config chooses by name cannot be called as its kind is, or has other options."""
