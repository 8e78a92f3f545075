"""Errors that end a training."""


class TrainingError(RuntimeError):
    """Training cannot continue: one line that says what is wrong, where, and what to do."""
