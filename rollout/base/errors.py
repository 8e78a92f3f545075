"""Exceptions of engines, models and environments, which fail one trajectory and never a run."""

from __future__ import annotations


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
