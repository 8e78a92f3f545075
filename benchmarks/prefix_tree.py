"""CPU time of an update on 8 responses of 64 tokens to a prompt of 512: as a tree, against whole sequences.

The vocabulary has 1k tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.groups import responses
from benchmarks.support.prefix_sharing import Trace, compare

VOCAB = 1024

if __name__ == "__main__":
    compare(
        Trace(name="prefix_tree", samples=responses(VOCAB), goal=4.0),
        vocab=VOCAB,
        max_tokens=8192,
    )
