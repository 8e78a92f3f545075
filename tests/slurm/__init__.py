"""Tests of the project on a real Slurm."""
