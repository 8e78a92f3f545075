"""Processes of a run: Ray, trainer ranks, device placement, checkpoints, Slurm, job log."""
