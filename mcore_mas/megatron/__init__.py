"""Training one policy with megatron-core; the only package that imports `megatron.core`.

spec: what a trainer is told, and its process groups · batch: micro-batches and load balancing · device: their way to
the device, and what a machine without Apex lacks · cpu: what one without CUDA lacks · patches: both, applied ·
model/: the GPT model · state/: its weights, in and out of any layout, and its optimizer · step/: passes and updates.
A process that drives trainers imports the first three, and Megatron is not loaded there.
"""
