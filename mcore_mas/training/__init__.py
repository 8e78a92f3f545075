"""The training of a run: the step, trainers and engines, weight sync, checkpoints, validation, metrics."""
