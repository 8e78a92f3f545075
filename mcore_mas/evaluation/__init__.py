"""Evaluation of trained teams: scores on held-out tasks, export of models, serving."""
