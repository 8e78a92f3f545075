"""The embedded engine: continuous batching in plain torch, for small models on a CPU or one GPU.

- `engine`    the asynchronous protocol: the dispatch loop, in this process or around a Ray actor;  `host`: its inside
- `batching`  admission, prefix reuse, decoding, version spans
- `rows`      the table of cache rows, and the sampler
- `decoder`   the model
"""
