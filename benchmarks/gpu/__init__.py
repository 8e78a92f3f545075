"""What a GPU does with the trainer: see `python -m benchmarks.gpu --help`."""
