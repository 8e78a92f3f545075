"""CPU time of an update on trajectories of a solver and a verifier: as trees, against every turn stored whole."""

from __future__ import annotations

import sys
from pathlib import Path

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.groups import team_trace
from benchmarks.support.prefix_sharing import Trace, compare

VOCAB = 1024

if __name__ == "__main__":
    compare(
        Trace(name="prefix_tree_turns", samples=team_trace(VOCAB), goal=3.0),
        vocab=VOCAB,
        max_tokens=8192,
    )
