"""What a GPU does with the trainer: `python -m benchmarks.gpu --help`."""
