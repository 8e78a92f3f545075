"""The embedded engine: continuous batching in plain torch, for small models on a CPU or one GPU.

- `engine`    in a Ray actor: both sides of the process border
- `batching`  admission, prefix reuse, decoding, version spans; the dispatch loop, and the engine in this process
- `rows`      the table of cache rows, and the sampler
- `cache`     keys and values, and attention over them
- `decoder`   the model
"""
