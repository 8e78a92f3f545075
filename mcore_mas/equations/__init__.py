"""Equations: tensors in, tensors out. Imports torch and nothing else."""
