"""The project on a real Slurm."""
