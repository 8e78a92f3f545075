"""Model folders in Hugging Face's format: architecture, chat template, tensors and tool calls."""
