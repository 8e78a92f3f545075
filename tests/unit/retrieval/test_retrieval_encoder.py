"""Encoders: published similarities, prefixes, batches, and refusal of other weights."""

import ast
import json
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModel, AutoTokenizer

from retrieval.corpus import RetrievalError
from retrieval.encoder import MINILM_SHA256, Encoder, minilm_folder, open_encoder
from tests.support import precision

ROOT = Path(__file__).resolve().parents[3]


def test_minilm_gives_the_published_similarity(encoder: Encoder) -> None:
    # The model's documentation prints 0.7553 for this pair.
    left, right = encoder.encode_passages(
        ["A man is eating food.", "A man is eating a piece of bread."]
    )
    assert float(left @ right) == pytest.approx(0.7553, abs=1e-4)
    assert encoder.identity.dim == 384
    assert left.dtype == np.float32
    assert float(left @ left) == pytest.approx(
        1.0, abs=left.size * 2**-24
    )  # rounding of a sum of so many terms


def mean_vectors(texts: list[str], dtype: torch.dtype) -> torch.Tensor:
    """Return the vectors of texts, each encoded by itself without padding, `[N, 384]`."""
    folder = minilm_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=dtype).eval()
    vectors = []
    with torch.inference_mode():
        for text in texts:
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            mean = hidden.mean(0)
            vectors.append(mean / mean.norm())
    return torch.stack(vectors)


@pytest.mark.slow
def test_pooling_is_the_mean_over_the_tokens_of_the_text(encoder: Encoder) -> None:
    text = "Amber Falls"
    reference = mean_vectors([text], torch.float32)[0]
    exact = mean_vectors([text], torch.float64)[0]
    longer = "a much longer neighbour that makes the first text padded " * 4
    padded = encoder.encode_passages([text, longer])[0]
    precision.assert_close(torch.from_numpy(padded), reference, exact)


@pytest.mark.slow
def test_the_vector_of_a_query_does_not_depend_on_its_batch(encoder: Encoder) -> None:
    queries = [
        f"Who is the mayor of town number {n}{' and of the next town' * (n % 5)}?"
        for n in range(70)
    ]
    together = encoder.encode_queries(queries)
    alone = np.concatenate([encoder.encode_queries([query]) for query in queries[:12]])
    assert (together[:12] == alone).all()
    reference = mean_vectors(queries, torch.float32)
    exact = mean_vectors(queries, torch.float64)
    for vectors in (together, encoder.encode_passages(queries)):
        precision.assert_close(torch.from_numpy(vectors), reference, exact)


def test_prefixes_and_pooling_are_explicit(encoder: Encoder) -> None:
    prefixed = Encoder(
        minilm_folder(),
        name="e5-like",
        pooling="mean",
        query_prefix="query: ",
        passage_prefix="passage: ",
    )
    assert (prefixed.encode_queries(["x"]) == encoder.encode_queries(["query: x"])).all()
    assert (prefixed.encode_passages(["x"]) == encoder.encode_passages(["passage: x"])).all()
    first_token = Encoder(minilm_folder(), name="cls", pooling="cls", normalise=False)
    assert abs(float(np.linalg.norm(first_token.encode_queries(["x"])[0])) - 1.0) > 0.1
    with pytest.raises(RetrievalError, match="unknown pooling 'max'; known: cls, mean"):
        Encoder(minilm_folder(), name="x", pooling="max")  # type: ignore[arg-type]


def test_long_texts_are_cut_and_no_text_gives_no_vectors(encoder: Encoder) -> None:
    assert encoder.encode_queries([]).shape == (0, 384)
    long = "word " * 5000
    assert (encoder.encode_queries([long]) == encoder.encode_queries([long + "tail"])).all()


def test_loading_touches_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert Encoder.of("minilm").identity.sha256 == MINILM_SHA256


def test_other_weights_are_refused_before_loading(encoder: Encoder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder(), folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(50_000_000)
        file.write(b"\x00\x01\x02\x03")
    with pytest.raises(RetrievalError, match=f"expected {MINILM_SHA256}"):
        open_encoder(encoder.identity, folder)
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(RetrievalError, match="auto_map"):
        Encoder(folder, name="x", pooling="mean")
    with pytest.raises(RetrievalError, match=r"no \*\.safetensors"):
        Encoder(tmp_path, name="x", pooling="mean")


def test_an_encoder_that_is_not_packaged_needs_a_folder(encoder: Encoder) -> None:
    with pytest.raises(RetrievalError, match="'e5-base-v2'; name its folder with"):
        open_encoder(replace(encoder.identity, name="e5-base-v2", sha256="0" * 64))


def test_a_gpu_that_is_not_there_is_one_line(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RetrievalError, match="torch finds no GPU on this machine; use device cpu"):
        encoder.to("cuda")


def test_the_client_imports_neither_torch_nor_faiss() -> None:
    heavy = "('torch', 'faiss', 'transformers', 'numpy')"
    code = f"import sys, retrieval.client; print([name for name in {heavy} if name in sys.modules])"
    root = Path(__file__).resolve().parents[3]
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "[]\n"


def test_the_environment_for_gpus_has_all_that_is_imported() -> None:
    imported = set()
    for path in (ROOT / "retrieval").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    environment = yaml.safe_load((ROOT / "retrieval/environment.yml").read_text())
    packages = {re.split("[=<>]", line)[0] for line in environment["dependencies"][-1]["pip"]}
    modules = {{"faiss-gpu": "faiss", "PyYAML": "yaml"}.get(name, name) for name in packages}
    assert imported - set(sys.stdlib_module_names) - {"retrieval"} - modules == set()
