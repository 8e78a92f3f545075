"""Memory in which an index of words (BM25) is built in parts, against bm25s, which builds it at once.

    python benchmarks/bm25_build.py [--passages 200000]

Passages of 100 words by Zipf's law. Each is built in a process of its own; its memory is what it had at its peak, over
what it had before.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bm25s
import numpy as np

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from retrieval.corpus import Corpus, Passage, write_corpus
from retrieval.lexical import Lexical

WORDS, VOCABULARY = 100, 250_000


def build(way: str, corpus: Corpus, out: Path) -> None:
    """Build it in one of two ways, and print MB and seconds."""
    before, began = peak_mb(), time.monotonic()
    if way == "parts":
        Lexical.build(corpus, out)
    else:
        index = bm25s.BM25()
        index.index(
            bm25s.tokenize([passage.contents for passage in corpus], show_progress=False),
            show_progress=False,
        )
        index.save(str(out / "bm25"), show_progress=False)
    print(peak_mb() - before, time.monotonic() - began)


def peak_mb() -> float:
    """Resident, at its most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def main() -> None:
    """Both ways; the last line compares their memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=200_000)
    parser.add_argument("--way", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        way, folder = options.way
        build(way, Corpus(Path(folder) / "corpus.jsonl"), Path(folder) / way)
        return
    with tempfile.TemporaryDirectory() as made:
        folder, random = Path(made), np.random.default_rng(0)
        texts = (
            " ".join(map("w{}".format, random.zipf(1.2, WORDS) % VOCABULARY))
            for _ in range(options.passages)
        )
        write_corpus(
            folder / "corpus.jsonl", (Passage(str(row), text) for row, text in enumerate(texts))
        )
        found = {}
        for way in ("parts", "at_once"):
            command = [sys.executable, __file__, "--way", way, made]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[way], seconds = map(float, done.stdout.split())
            print(
                f"{way}: {1e6 * found[way] / options.passages:.0f} bytes a passage, {seconds:.0f} s"
            )
        kept = sum(path.stat().st_size for path in (folder / "parts" / "bm25").glob("[!.]*"))
        print(f"the index: {kept / options.passages:.0f} bytes a passage")
        same = all(
            path.read_bytes() == (folder / "parts" / "bm25" / path.name).read_bytes()
            for path in (folder / "at_once" / "bm25").iterdir()
        )
        print(f"both are the same to the byte: {same}")
        assert same
    print(
        f"name=bm25_build ratio={found['at_once'] / found['parts']:.2f} goal=3.00 reference=bm25s_at_once n=1"
    )


if __name__ == "__main__":
    main()
