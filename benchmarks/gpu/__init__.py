"""Measurements and checks of the trainer on a GPU: `python -m benchmarks.gpu --help`."""
