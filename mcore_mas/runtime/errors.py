"""Errors that end a training."""


class TrainingError(RuntimeError):
    """Training cannot continue: one line that says what is wrong, where, and what to do."""


class ClusterError(RuntimeError):
    """No Ray starts on this machine, or a running one cannot be used: one line that says what, where, what to do."""
