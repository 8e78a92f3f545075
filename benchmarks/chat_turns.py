"""CPU time of an update on chats of 16 and 64 turns with tools: each chat as one path of a tree, against whole turns.

Task, reply and result have a quarter of the lengths 300, 100 and 150 that such chats have in
practice, which leaves the share of repeated tokens the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.groups import tool_trace
from benchmarks.support.prefix_sharing import Trace, compare

VOCAB = 1024
LENGTHS = {"task_tokens": 75, "reply_tokens": 25, "result_tokens": 38}

if __name__ == "__main__":
    compare(
        Trace(
            name="chat_turns_16",
            samples=tool_trace(VOCAB, turns=16, chats=8, **LENGTHS),
            goal=8.0,
        ),
        Trace(
            name="chat_turns",
            samples=tool_trace(VOCAB, turns=64, chats=1, **LENGTHS),
            goal=25.0,
        ),
        vocab=VOCAB,
        max_tokens=8192,
    )
