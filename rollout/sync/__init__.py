"""Weight sync: how a trainer's weights reach an engine.

- `transport.py`: routes, updates, and the senders by name
- `shared.py`: the embedded engine's buffers in shared memory
- `disk.py`: a folder that trainer and engine both see
- `push.py`, `cuda_ipc.py`, `process_group.py`: running SGLang servers
- `memory.py`: this user's folder in shared memory
"""
