"""The embedded engine: continuous batching in torch, with Triton kernels on a GPU, for small models."""
