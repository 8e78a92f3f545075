"""Training one policy with megatron-core; the only package that imports `megatron.core`.

- `spec.py`: settings of a trainer, and its process groups
- `batch.py`: micro-batches and load balancing
- `device.py`, `transfer.py`: the device of a rank, and copies between host and GPU
- `apex_replacements.py`, `cpu.py`: stand-ins for Apex, and for CUDA on a machine without a GPU
- `patches.py`: applies both to megatron-core
- `model/`: the GPT model
- `state/`: its weights in every layout, and its optimizer
- `step/`: passes over micro-batches, and updates

A process that drives trainers imports the first three files, and Megatron is not loaded there.
"""
