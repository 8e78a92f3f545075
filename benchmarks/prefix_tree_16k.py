"""One update on 8 responses of 64 tokens to a prompt of 512, stored as a tree, against whole sequences; 16k tokens."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from benchmarks.support.groups import responses
from benchmarks.support.prefix_sharing import compare

if __name__ == "__main__":
    compare("prefix_tree_16k", responses(16384), vocab=16384, max_tokens=8192, goal=3.5)
