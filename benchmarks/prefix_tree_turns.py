"""One update on recorded trajectories of a solver and a verifier, stored as trees, against every turn whole."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from benchmarks.support.groups import team_trace
from benchmarks.support.prefix_sharing import compare

if __name__ == "__main__":
    compare("prefix_tree_turns", team_trace(1024), vocab=1024, max_tokens=8192, goal=3.0)
