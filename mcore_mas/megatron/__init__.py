"""Training of one policy with megatron-core; the only package that imports `megatron.core`.

- `spec.py`: specification of a trainer, and its process groups
- `batch.py`: micro-batches and load balancing
- `device.py`, `transfer.py`: the device of a rank, and copies between host and GPU
- `host_memory.py`: reused blocks of memory for copies of tensors, on the host or on a device
- `main_grad.py`: gradients of weights that are summed in Megatron's float32 buffer
- `collectives.py`, `rank_watch.py`: exchange of plain values between ranks, and a watchdog of ranks
- `apex_replacements.py`: faster replacements for Megatron's fallbacks without Apex
- `cpu.py`, `versions.py`: support for machines without a GPU, and for several versions of Megatron
- `patches.py`: applies the replacements to megatron-core
- `model/`: the GPT model
- `state/`: its weights in every layout, and its optimizer
- `step/`: passes over micro-batches, and updates

A process that drives trainers imports `spec.py` and `batch.py`, which do not import Megatron.
"""
