"""One update on chats with tools of 16 and of 64 turns, each chat one path of a tree, against every turn whole.

Task, reply and result have a quarter of the lengths 300, 100 and 150 that such chats have in practice: what whole turns
cost more is the same share of the tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from benchmarks.support.groups import tool_trace
from benchmarks.support.prefix_sharing import compare_all

if __name__ == "__main__":
    lengths = {"task": 75, "sampled": 25, "observed": 38}
    traces = [
        ("chat_turns_16", tool_trace(1024, turns=16, samples=8, **lengths), 8.0),
        ("chat_turns", tool_trace(1024, turns=64, samples=1, **lengths), 25.0),
    ]
    compare_all(traces, vocab=1024, max_tokens=8192)
