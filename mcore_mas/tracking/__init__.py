"""Metrics and traces of a run, sent to MLflow, Weights & Biases and TensorBoard."""
