"""Acquisition of data sets and models from a fake hub: pinned, resumed, verified and converted."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.experiments import experiments
from mcore_mas.pipeline import acquire as acquiring
from mcore_mas.pipeline.acquire import acquire
from mcore_mas.pipeline.base_model import make_tiny_model
from mcore_mas.pipeline.convert import assemble
from mcore_mas.pipeline.hub import AcquireError, Hub
from mcore_mas.pipeline.inputs_page import report_inputs
from mcore_mas.pipeline.sources import Source, load_sources
from rollout.config.data import DataConfig
from rollout.tasks.splits import SPLITS
from tests.support.hub import COMMIT, FakeHub, running

DATA = "data/math/math_500.parquet"
MODEL = "models/Qwen3-Mini"
ROWS = [
    {"problem": "What is 1+1?", "answer": "2", "unique_id": "a"},
    {"problem": "What is 1+1?", "answer": "2", "unique_id": "a"},  # the same row
    {"problem": "What is $1+1$?", "answer": "2", "unique_id": "b"},  # the same text except LaTeX
    {"problem": "What is 1+1?", "answer": "3", "unique_id": "a"},  # contradicts the first
    {"problem": "What is 2+2?", "answer": "", "unique_id": "c"},
    {"problem": "What is 3+3?", "answer": "6", "unique_id": "d"},
]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Return a hub with one data set; the test works in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running(
        FakeHub({"datasets/some/math": {"test.jsonl": LINES, "README": b"about"}})
    ) as server:
        yield server


def set_source(monkeypatch: pytest.MonkeyPatch, item: str = DATA, **keys: object) -> Source:
    """Make a source of `item` the only one; return it."""
    defaults = {"repository": "some/math", "files": ("test.jsonl",), "format": "math_500"}
    source = Source.model_validate({**defaults, **keys})
    monkeypatch.setattr(acquiring, "load_sources", lambda: {item: source})
    return source


def client(server: FakeHub, **keys: bool) -> Hub:
    return Hub(endpoint=server.url, **keys)


def test_a_data_set_is_fetched_converted_and_recorded(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_source(monkeypatch, revision=COMMIT)
    acquire(DATA, Path("r.json"), client(hub))
    receipt = json.loads(Path("r.json").read_text())
    digest = hashlib.sha256(LINES).hexdigest()
    assert pq.read_table(DATA).to_pylist() == [ROWS[0], ROWS[2], ROWS[5]]
    assert {key: receipt[key] for key in ("rows", "kept", "duplicates", "repeated", "dropped")} == {
        "rows": 6,
        "kept": 3,
        "duplicates": 1,
        "repeated": 1,
        "dropped": {
            "repeats the question of another row with another answer": 1,
            "has no answer": 1,
        },
    }
    assert json.loads(Path("data/sources.lock").read_text()) == {
        "some/math": {
            "revision": COMMIT,
            "files": {"test.jsonl": {"bytes": len(LINES), "sha256": digest}},
        }
    }
    requests = [path for path, _ in hub.requests]
    assert requests[0] == f"api/datasets/some/math/revision/{COMMIT}"
    assert set(requests[1:]) == {f"datasets/some/math/resolve/{COMMIT}/test.jsonl"}

    # It is converted again from the downloaded file, without a request.
    Path(DATA).unlink()
    acquire(DATA, Path("r.json"), client(hub, offline=True))
    assert [path for path, _ in hub.requests] == requests


def test_later_downloads_must_equal_the_first_one(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_source(monkeypatch)
    acquire(DATA, Path("r.json"), client(hub))
    assert json.loads(Path("r.json").read_text())["revision"] == COMMIT
    for path in (Path(DATA), Path("data/raw/some--math/test.jsonl")):
        path.unlink()
    hub.repositories["datasets/some/math"]["test.jsonl"] = LINES.replace(b"3+3", b"4+2")
    digest = hashlib.sha256(LINES).hexdigest()
    with pytest.raises(
        AcquireError,
        match=rf"sha256 is \w+, but data/sources.lock says {digest}; the file is removed",
    ):
        acquire(DATA, Path("r.json"), client(hub))
    revisions = {path for path, _ in hub.requests if path.startswith("api/")}
    assert f"api/datasets/some/math/revision/{COMMIT}" in revisions  # the lock file's revision
    assert not Path(DATA).exists()


def test_files_that_are_complete_are_not_downloaded_again(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = LINES.splitlines(keepends=True)[::5]
    hub.repositories["datasets/some/math"] = {"a.jsonl": first, "b.jsonl": second}
    set_source(monkeypatch, files=("*.jsonl",))
    hub.cut["b.jsonl"] = 10
    with pytest.raises(AcquireError, match="answered 503"):
        acquire(DATA, Path("r.json"), client(hub))
    assert not Path("data/sources.lock").exists()
    assert [path.name for path in Path("data/raw/some--math").glob("*.jsonl")] == ["a.jsonl"]

    interrupted = len(hub.requests)
    acquire(DATA, Path("r.json"), client(hub))
    assert not [path for path, _ in hub.requests[interrupted:] if path.endswith("a.jsonl")]
    assert pq.read_table(DATA).to_pylist() == [ROWS[0], ROWS[5]]
    assert not Path("data/raw/some--math/.cache").exists()


def test_files_with_wrong_digests_are_refused_and_removed(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_source(monkeypatch, sha256={"test.jsonl": "0" * 64})
    with pytest.raises(
        AcquireError,
        match=r"test\.jsonl: sha256 is \w{64}, but sources.yaml says 0+; the file is removed",
    ):
        acquire(DATA, Path("r.json"), client(hub))
    set_source(monkeypatch)
    hub.swapped.add("test.jsonl")
    with pytest.raises(
        AcquireError,
        match=rf"but {hub.url} says {hashlib.sha256(LINES).hexdigest()}; the file is removed",
    ):
        acquire(DATA, Path("r.json"), client(hub))
    assert not Path("data/raw/some--math/test.jsonl").exists()


@pytest.mark.parametrize("name", ["../test.jsonl", "/tmp/test.jsonl", "a/../../test.jsonl"])
def test_a_hub_that_lists_a_file_outside_is_refused(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    set_source(monkeypatch, files=("*test.jsonl",))
    hub.repositories["datasets/some/math"] = {name: LINES}
    with pytest.raises(
        AcquireError, match=f"some/math: {hub.url} lists '{name}', which leads out of its folder"
    ):
        acquire(DATA, Path("r.json"), client(hub))
    assert not [*tmp_path.rglob("*test.jsonl")]


def test_errors_of_the_hub_say_what_to_do(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("datasets/some/math")
    set_source(monkeypatch, licence="llama3.2", gated=True)
    page = f"{hub.url}/datasets/some/math"
    with pytest.raises(
        AcquireError,
        match=rf"no access \(403\); accept the licence llama3.2 at {page}, and set HF_TOKEN",
    ):
        acquire(DATA, Path("r.json"), client(hub))
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    with pytest.raises(AcquireError, match=r"some/math: no access \(403\)"):
        acquire(DATA, Path("r.json"), client(hub))
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    acquire(DATA, Path("r.json"), client(hub))
    assert hub.tokens_elsewhere == set()  # the host of large files gets no token
    Path(DATA).unlink()
    set_source(monkeypatch, files=("train.jsonl", "train-*.parquet"))
    with pytest.raises(
        AcquireError,
        match=r"no file like train.jsonl or train-\*.parquet; it has test.jsonl, README",
    ):
        acquire(DATA, Path("r.json"), client(hub))
    set_source(monkeypatch, repository="some/other")
    with pytest.raises(
        AcquireError, match=r"datasets/some/other: no such repository, or it is not public \(401\)"
    ):
        acquire(DATA, Path("r.json"), client(hub))
    set_source(monkeypatch, revision="f" * 40)
    with pytest.raises(AcquireError, match=f"some/math: no revision f+ at {hub.url}"):
        acquire(DATA, Path("r.json"), client(hub))
    # Without a revision of the source, that of the lock file is requested.
    set_source(monkeypatch)
    Path("data/sources.lock").write_text(json.dumps({"some/math": {"revision": "e" * 40}}))
    with pytest.raises(AcquireError, match=f"some/math: no revision e+ at {hub.url}"):
        acquire(DATA, Path("r.json"), client(hub))
    with pytest.raises(
        AcquireError, match="some/math: offline, and its files are not in data/raw/some--math"
    ):
        acquire(DATA, Path("r.json"), client(hub, offline=True))
    with pytest.raises(
        AcquireError,
        match=r"127.0.0.1:9: cannot fetch some/math .* name another hub in HF_ENDPOINT",
    ):
        acquire(DATA, Path("r.json"), Hub(endpoint="http://127.0.0.1:9"))
    set_source(monkeypatch, repository=None, by_hand="train.json of github.com/x")
    with pytest.raises(
        AcquireError,
        match=r"it is on no hub; put .* there by hand, from train.json of github.com/x",
    ):
        acquire(DATA, Path("r.json"), client(hub))


@pytest.mark.parametrize("loop", ["api/", "datasets/some/math/resolve"])
def test_redirects_without_an_end_are_refused(
    loop: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.loops = (loop,)
    set_source(monkeypatch)
    with pytest.raises(AcquireError, match=r"cannot fetch some/math \(.*redirects") as refusal:
        acquire(DATA, Path("r.json"), client(hub))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "listing", [b"<html>", b"[]", b"{}", b'{"siblings": 5}', b'{"siblings": [{}]}', b"null"]
)
def test_answers_that_no_hub_gives_are_refused(
    listing: bytes, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.listing = listing
    set_source(monkeypatch)
    with pytest.raises(AcquireError) as refusal:
        acquire(DATA, Path("r.json"), client(hub))
    assert str(refusal.value).startswith(("some/math", hub.url))
    assert "\n" not in str(refusal.value)


def test_a_file_of_github_is_fetched_by_its_commit_and_digest(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    file = f"data/{'a' * 40}.jsonl"
    digest = hashlib.sha256(LINES).hexdigest()
    item = "data/math/math_500.json"
    keys = {
        "item": item,
        "host": "github",
        "files": (file,),
        "revision": COMMIT,
        "licence": "mit",
        "rows": 6,
    }
    source = set_source(monkeypatch, **keys, sha256={file: digest})
    assert source.description == "some/math of GitHub, 6 rows, licence mit"
    github = Hub(endpoint="http://127.0.0.1:9", github=hub.url)
    with pytest.raises(
        AcquireError,
        match=rf"{hub.url}/some/math: .*; (see HF_TOKEN|try again, or put its file there)",
    ):
        acquire(item, Path("r.json"), github)
    hub.raw[f"some/math/{COMMIT}/{file}"] = LINES
    acquire(item, Path("r.json"), github)
    receipt = json.loads(Path("r.json").read_text())
    assert receipt["revision"] == COMMIT
    assert receipt["files"][file]["sha256"] == digest
    assert receipt["kept"] == 3
    assert hub.tokens_elsewhere == set()  # GitHub does not get the hub's token
    # the item's name says that it is a JSON file
    assert json.loads(Path(item).read_text()) == [ROWS[0], ROWS[2], ROWS[5]]

    acquire(item, Path("again.json"), github)  # the existing file is checked
    assert json.loads(Path("again.json").read_text())["kept"] == 3
    Path(item).unlink()
    Path("data/sources.lock").unlink()
    set_source(monkeypatch, **keys, sha256={file: "0" * 64})
    with pytest.raises(
        AcquireError, match=r"sha256 is \w{64}, but sources.yaml says 0+; the file is removed"
    ):
        acquire(item, Path("r.json"), github)


def test_rows_are_drawn_as_the_authors_draw_them(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy's RandomState(42).choice(6, 2, replace=False) draws rows 0 and 1, which are equal."""
    set_source(monkeypatch, rows=6, drawn=(2, 42))
    acquire(DATA, Path("r.json"), client(hub))
    receipt = json.loads(Path("r.json").read_text())
    assert (receipt["kept"], receipt["duplicates"]) == (1, 1)
    assert receipt["dropped"] == {"is not drawn": 4}

    acquire(DATA, Path("r.json"), client(hub))  # the existing file is not drawn from again
    assert json.loads(Path("r.json").read_text())["kept"] == 1


def test_unexpected_rows_or_columns_are_refused(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_source(monkeypatch, rows=500)
    with pytest.raises(AcquireError, match="some/math: 6 rows, expected 500"):
        acquire(DATA, Path("r.json"), client(hub))
    set_source(monkeypatch, format="apps")
    with pytest.raises(
        AcquireError, match=r"no row of format apps \(is not a programming problem with tests\)"
    ):
        acquire(DATA, Path("r.json"), client(hub))
    set_source(monkeypatch, where={"unique_id": "a"})
    acquire(DATA, Path("r.json"), client(hub))
    assert json.loads(Path("r.json").read_text())["rows"] == 3


def test_an_existing_file_is_checked_and_used(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(DATA).parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(ROWS[:1]), DATA)
    set_source(monkeypatch)
    acquire(DATA, Path("r.json"), client(hub))
    assert json.loads(Path("r.json").read_text())["origin"] == "was there"
    assert hub.requests == []
    Path(DATA).write_bytes(b"PAR1")
    with pytest.raises(
        AcquireError, match=r"math_500.parquet: cannot be read .*; remove it to have it fetched"
    ):
        acquire(DATA, Path("r.json"), client(hub))


def test_a_model_appears_when_all_its_files_are_complete(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tmp_path / "original" / "Qwen3-Mini"
    make_tiny_model(original)
    files = {path.name: path.read_bytes() for path in original.iterdir()}
    hub.repositories["some/model"] = {
        **files,
        "onnx/model.onnx": b"not downloaded",
        "notes.md": b"not downloaded",
    }
    set_source(monkeypatch, MODEL, repository="some/model", files=(), format=None)
    hub.cut["model.safetensors"] = 1000
    with pytest.raises(AcquireError, match="some/model: answered 503"):
        acquire(MODEL, Path("r.json"), client(hub))
    assert not Path(MODEL).exists()
    acquire(MODEL, Path("r.json"), client(hub))
    assert {path.name: path.read_bytes() for path in Path(MODEL).iterdir()} == files
    receipt = json.loads(Path("r.json").read_text())
    assert (receipt["model_type"], receipt["revision"]) == ("qwen3", COMMIT)
    weights = Path(MODEL, "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(
        AcquireError, match=r"model.safetensors: not a readable safetensors file .*; remove models/"
    ):
        acquire(MODEL, Path("r.json"), client(hub))


def test_parts_of_a_file_are_joined(tmp_path: Path) -> None:
    (tmp_path / "part_aa").write_bytes(b"ab")
    (tmp_path / "part_ab").write_bytes(b"cd")
    assemble([tmp_path / "part_aa", tmp_path / "part_ab"], tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"abcd"
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_compressed_files_and_archives_are_unpacked(tmp_path: Path) -> None:
    """wiki-18.jsonl.gz is a compressed tar archive of one file."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        folder = tarfile.TarInfo("data00")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        entry = tarfile.TarInfo("data00/wiki_dump.jsonl")
        entry.size = len(LINES)
        archive.addfile(entry, io.BytesIO(LINES))
    for content in (LINES, tar.getvalue()):
        (tmp_path / "a.gz").write_bytes(gzip.compress(content))
        assemble([tmp_path / "a.gz"], tmp_path / "corpus")
        assert (tmp_path / "corpus").read_bytes() == LINES
    (tmp_path / "a.gz").write_bytes(gzip.compress(LINES)[:-9])
    with pytest.raises(AcquireError, match=r"a.gz: damaged \(.*\); remove it"):
        assemble([tmp_path / "a.gz"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_report_lists_leaks_between_splits(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_source(monkeypatch)
    acquire(DATA, Path("r.json"), client(hub))
    data = {
        "format": "math_500",
        "train": DATA,
        "validation": {"path": DATA, "limit": 1},
        "test": {"path": DATA, "skip": 1},
    }
    report_inputs([Path("r.json")], {"one": (data, 1), "two": (data, 1)}, Path("inputs.md"))
    page = Path("inputs.md").read_text()
    dropped = "1 repeats the question of another row with another answer; 1 has no answer"
    size = Path(DATA).stat().st_size
    assert (
        f"| {DATA} | some/math of the hub | {COMMIT[:12]} | {size} | 6 | 3 | 1 | 1 | {dropped} |"
        in page
    )
    assert page.splitlines()[-5:] == [
        "- one and 1 more: 1 of 1 validation tasks are in train, by id",
        "- one and 1 more: 1 of 1 validation tasks are in train, by text",
        "- one and 1 more: 2 of 2 test tasks are in train, by id",
        "- one and 1 more: 2 of 2 test tasks are in train, by text",
        "- one and 1 more: 1 of 2 test tasks are in validation, by text",
    ]


def test_inputs_that_no_hub_has_are_named_when_all_others_are_in_place(tmp_path: Path) -> None:
    page = tmp_path / "inputs.md"
    message = "put these in place by hand, and start the command again: data/a: of x; data/b: of y$"
    with pytest.raises(AcquireError, match=message):
        report_inputs([], {}, page, by_hand=["  data/a: of x", "  data/b: of y"])
    assert not page.exists()


@pytest.mark.slow
def test_every_published_input_has_a_source() -> None:
    sources = load_sources()
    for name in experiments():
        config = resolve([f"experiment={name}"])
        data = DataConfig.model_validate(config["data"])
        files = [file for split in SPLITS for file in data.files(split)]
        models = [policy["model"] for policy in config["policies"].values() if policy["model"]]
        paths = [*(str(file.path) for file in files), *models]
        missing = [path for path in paths if path not in sources]
        # Models in results/ are made by a cold start.
        assert not [path for path in missing if not path.startswith("results/")], name
        readers = {
            (file.format or data.format).removesuffix("_shown"): sources[str(file.path)].format
            for file in files
        }
        for data_format, source_format in readers.items():
            assert data_format == source_format, name
    assert all(len(source.revision or "f" * 40) == 40 for source in sources.values())
    # No public code says which revision of these was used.
    unpinned = [
        path for path, source in sources.items() if source.repository and not source.revision
    ]
    assert unpinned == [
        "data/math/amc_23.parquet",
        "data/math/minerva.parquet",
        "data/math/olympiad_bench.parquet",
        "data/math/dapo_filter.parquet",
        "models/DeepScaleR-1.5B-Preview",
        "models/AReaL-boba-2-8B",
        "models/AReaL-boba-2-14B",
        "models/AReaL-boba-2-32B",
    ]
    github_sources = [source for source in sources.values() if source.host == "github"]
    assert all(
        source.revision and set(source.files) == set(source.sha256) for source in github_sources
    )
    assert all(
        len(digest) == 64 for source in sources.values() for digest in source.sha256.values()
    )
