"""A trainer's weights and optimizer state: Hugging Face names, import, export, adapters, checkpoints."""
