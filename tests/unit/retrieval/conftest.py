"""One small real index, and one real server, for all retrieval tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from retrieval.build import build_index
from retrieval.corpus import Passage, write_corpus
from retrieval.encoder import Encoder
from retrieval.sidecar import RetrieverSidecar

FACTS = [
    ("Alice Walker", "Alice Walker lives in Amber Falls and works as a weaver."),
    ("Amber Falls", "Amber Falls lies on the river Tessel. Its mayor is Hugo Brandt."),
    ("Hugo Brandt", "Hugo Brandt lives in Amber Falls and works as a lawyer."),
    ("Iron Bridge", "Iron Bridge lies on the river Orvane. Its mayor is Clara Dawson."),
    ("Clara Dawson", "Clara Dawson lives in Iron Bridge and works as a baker."),
]


@pytest.fixture(scope="session")
def passages() -> list[Passage]:
    return [Passage.compose(str(row), title, text) for row, (title, text) in enumerate(FACTS)]


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    torch.set_num_threads(1)  # tests share the machine, and a second thread would only spin
    return Encoder.of("minilm")


@pytest.fixture(scope="session")
def index_dir(
    tmp_path_factory: pytest.TempPathFactory, passages: list[Passage], encoder: Encoder
) -> Path:
    """Return a folder with corpus.jsonl and, in index/, its index. Tests that damage files use a copy."""
    folder = tmp_path_factory.mktemp("retrieval")
    write_corpus(folder / "corpus.jsonl", passages)
    build_index(folder / "corpus.jsonl", folder / "index", encoder)
    return folder / "index"


@pytest.fixture(scope="session")
def server_url(index_dir: Path) -> Iterator[str]:
    with RetrieverSidecar(index_dir) as url:
        yield url
