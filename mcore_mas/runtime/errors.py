"""Errors that end a training run."""


class TrainingError(RuntimeError):
    """Error that ends a training run.

    The message is one line: what is wrong, where, and what to do.
    """


class ClusterError(RuntimeError):
    """Error of a Ray cluster that cannot be started on this machine, or joined.

    The message is one line: what is wrong, where, and what to do.
    """
