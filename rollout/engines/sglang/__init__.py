"""SGLang engine: servers in a Python environment of their own, reached over HTTP."""

SGLANG_VERSION = "0.5.23"  # version that requirements/sglang.txt pins and `make test-sglang` runs
