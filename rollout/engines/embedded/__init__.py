"""The embedded engine: continuous batching in plain torch, for small models on a CPU or one GPU."""
