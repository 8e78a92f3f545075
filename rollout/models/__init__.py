"""Model folders in Hugging Face's format, read once for engines and trainers: shape, chat template, tensors."""
