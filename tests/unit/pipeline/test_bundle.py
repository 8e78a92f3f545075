"""A table's bundle, made by hand, and what is wrong with changed ones."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcore_mas.cli.main import app
from mcore_mas.pipeline.bundle import METADATA, BundleError, make_bundle, verify_bundle
from mcore_mas.pipeline.paper_suite import write_paper_table

CONFIG = """\
seed: {seed}
policies: {{one: {{model: {model}}}}}
data: {{train: [{file}], validation: [{file}], test: [{file}], format: math}}
retriever: {{folder: {index}, encoder_folder: {encoder}}}
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Of MARTI's test-time RL: one task, solved by the debate in one of two answers and by the single agent in none."""
    results = tmp_path / "results"
    model, file = results / "models" / "m", results / "data" / "aime.jsonl"
    index, encoder = (
        results / "wiki" / "vectors.index",
        results / "models" / "e5" / "encoder.safetensors",
    )
    made = {model / "config.json": "{}", model / "model.safetensors": "weights", file: "rows"}
    for path, text in {**made, index: "vectors", encoder: "encoder"}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    evaluations = {}
    for run, scores in (("marti_single_ttrl", [0.0, 0.0]), ("marti_debate_ttrl", [1.0, 0.0])):
        metrics = {"avg@2": sum(scores) / 2, "pass@2": max(scores)}
        tasks = [{"task_id": "a/0", "source": "aime_2024", "scores": scores, "metrics": metrics}]
        content = {
            "run": run,
            "state": "trained",
            "k": 2,
            "commit": run[6:12],
            "replies": 2,
            "overlong": 0,
            "cut": 0,
            "failed": {},
        }
        path = results / run / "evaluation" / "trained.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**content, "rows": [], "tasks": tasks}))
        (results / run / "config.yaml").write_text(
            CONFIG.format(
                seed=42 if "single" in run else 1,
                model=model,
                file=file,
                index=index.parent,
                encoder=encoder.parent,
            )
        )
        evaluations[f"{run}/trained"] = [str(path)]
    write_paper_table("marti_ttrl", evaluations, results / "tables" / "marti_ttrl.md", scale="tiny")
    out = results / "tables" / "marti_ttrl.bundle.zip"
    make_bundle(out.with_name("marti_ttrl.json"), out)
    return out


def read(bundle: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(bundle) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def changed(bundle: Path, name: str, change: Callable[[bytes], bytes], *, described: bool) -> Path:
    """The bundle with another member, whose new digest its description may have."""
    contents = read(bundle)
    contents[name] = change(contents[name])
    if described:
        crate = json.loads(contents[METADATA])
        entity = next(entity for entity in crate["@graph"] if entity["@id"] == name)
        entity |= {
            "sha256": hashlib.sha256(contents[name]).hexdigest(),
            "contentSize": str(len(contents[name])),
        }
        contents[METADATA] = json.dumps(crate).encode()
    out = bundle.with_name("changed.zip")
    with zipfile.ZipFile(out, "w") as archive:
        for member, content in contents.items():
            archive.writestr(member, content)
    return out


def test_it_says_what_the_table_was_made_of(bundle: Path) -> None:
    contents = read(bundle)
    assert sorted(contents) == [
        "environment.json",
        "inputs.json",
        "made.json",
        "requirements.txt",
        METADATA,
        "runs/marti_debate_ttrl/config.yaml",
        "runs/marti_debate_ttrl/evaluation/trained.json",
        "runs/marti_single_ttrl/config.yaml",
        "runs/marti_single_ttrl/evaluation/trained.json",
        "table.csv",
        "table.md",
        "table.yaml",
    ]
    inputs = {
        Path(file["path"]).name: file for file in json.loads(contents["inputs.json"])["files"]
    }
    assert inputs["model.safetensors"]["sha256"] == hashlib.sha256(b"weights").hexdigest()
    assert inputs["vectors.index"]["sha256"] == hashlib.sha256(b"vectors").hexdigest()
    names = [
        "aime.jsonl",
        "config.json",
        "encoder.safetensors",
        "model.safetensors",
        "vectors.index",
    ]
    assert (inputs["aime.jsonl"]["bytes"], sorted(inputs)) == (4, names)
    assert (
        b"seeds 1, 42; commit debate, single." in contents["table.md"]
    )  # those that the runs were drawn with
    assert "ours agrees" in json.loads(contents["made.json"])["tolerance"]
    graph = {entity["@id"]: entity for entity in json.loads(contents[METADATA])["@graph"]}
    assert graph[METADATA]["conformsTo"] == {"@id": "https://w3id.org/ro/crate/1.1"}
    assert {"name", "description", "datePublished", "license", "hasPart"} < graph["./"].keys()
    assert graph["table.csv"]["sha256"] == hashlib.sha256(contents["table.csv"]).hexdigest()
    assert graph["#making"]["result"] == [{"@id": "table.csv"}, {"@id": "table.md"}]


def test_it_is_verified_in_another_folder(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    bundle.replace(elsewhere / "b.zip")
    (tmp_path / "results").rename(tmp_path / "gone")
    monkeypatch.chdir(elsewhere)
    done = CliRunner().invoke(app, ["verify", "b.zip"])
    assert done.exit_code == 0
    assert done.stdout.startswith(
        "b.zip: 11 files as described; the table of 2 evaluations is what their per-task scores"
    )
    assert list(elsewhere.iterdir()) == [elsewhere / "b.zip"]


def test_a_flipped_byte_is_refused(bundle: Path) -> None:
    whole = bundle.read_bytes()
    with zipfile.ZipFile(bundle) as archive:
        starts = {
            info.filename: info.header_offset + 30 + len(info.filename)
            for info in archive.infolist()
        }
    for start in starts.values():
        bundle.write_bytes(whole[: start + 9] + bytes([whole[start + 9] ^ 1]) + whole[start + 10 :])
        with pytest.raises(BundleError, match="damaged, or no bundle of a table"):
            verify_bundle(bundle)


DEBATE = "runs/marti_debate_ttrl/evaluation/trained.json"


@pytest.mark.parametrize(
    ("name", "old", "new", "described", "words"),
    [
        (
            DEBATE,
            b"[1.0, 0.0]",
            b"[1.0, 1.0]",
            False,
            f"{DEBATE}: sha256 is .* and {METADATA} says",
        ),
        (
            DEBATE,
            b"[1.0, 0.0]",
            b"[1.0, 1.0]",
            True,
            r"task 'a/0' says avg@2 0.5; its scores give 1",
        ),
        (
            DEBATE,
            b'"a/0", "source": "aime_2024"',
            b'"a/0", "source": "amc"',
            True,
            r"table.csv, line \d: its scores give",
        ),
        (
            "table.csv",
            b"0.500000",
            b"0.600000",
            True,
            "table.csv, line 3: its scores give .*0.50.*says .*0.60",
        ),
        ("table.md", b"50.0", b"66.7", True, r"table.md, line \d+: its scores give"),
        ("inputs.json", b'"bytes": 4', b'"bytes": 5', False, "inputs.json: sha256 is"),
    ],
)
def test_what_was_changed_is_said(
    bundle: Path, name: str, old: bytes, new: bytes, described: bool, words: str
) -> None:
    with pytest.raises(BundleError, match=words):
        verify_bundle(
            changed(bundle, name, lambda content: content.replace(old, new), described=described)
        )


def test_a_member_that_would_fill_the_memory_is_refused_before_it_is_unpacked(
    tmp_path: Path,
) -> None:
    bomb = tmp_path / "b.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ro-crate-metadata.json", b"{ }")
        archive.writestr("scores.json", b"0" * 1000)
    whole = bomb.read_bytes()  # 1000 in the directory's entry becomes 4,294,967,294
    at = whole.rindex((1000).to_bytes(4, "little"))
    bomb.write_bytes(whole[:at] + (2**32 - 2).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(BundleError, match=r"4\.3 GB unpacked, and a bundle has at most 4\.3 GB"):
        verify_bundle(bomb)


DEEP = b"[" * 200_000
MADE = b'{"evaluations": {"a": ["e.json"]}}'


@pytest.mark.parametrize(
    "described", [b'{"@graph": ["x"]}', b'{"@graph": null}', b"[1]", b"5", DEEP, b"\xff"]
)
def test_a_description_that_is_none_is_refused_in_one_line(
    described: bytes, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr(METADATA, described)
    with pytest.raises(
        BundleError, match=r"b\.zip: damaged, or no bundle of a table \(\w+Error: [^\n]+\)$"
    ):
        verify_bundle(tmp_path / "b.zip")


@pytest.mark.parametrize(
    "members",
    [
        {"a": b"", "a/b": b""},  # a file where a folder is
        {"a" * 300: b""},
        {".": b""},
        {"made.json": b'{"evaluations": []}'},
        {"made.json": DEEP},
        {"made.json": MADE, "e.json": b'{"k": 1, "tasks": [{"scores": ["x"]}]}'},
    ],
)
def test_members_that_somebody_made_on_purpose_are_refused_in_one_line(
    members: dict[str, bytes], tmp_path: Path
) -> None:
    files = [
        {
            "@id": n,
            "@type": "File",
            "sha256": hashlib.sha256(own).hexdigest(),
            "contentSize": str(len(own)),
        }
        for n, own in members.items()
    ]
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr(METADATA, json.dumps({"@graph": files}))
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    with pytest.raises(
        BundleError, match=r"b\.zip: damaged, or no bundle of a table \(\w+Error: [^\n]+\)$"
    ):
        verify_bundle(tmp_path / "b.zip")


@pytest.mark.parametrize(
    ("at", "value"), [(8, 1), (10, 99), (10, 14), (10, 12)]
)  # encrypted; unknown; lzma; bz2
def test_a_member_that_cannot_be_unpacked_is_refused_in_one_line(
    at: int, value: int, tmp_path: Path
) -> None:
    path = tmp_path / "b.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(METADATA, "{}")
    content = bytearray(path.read_bytes())
    content[content.rfind(b"PK\x01\x02") + at] = content[at - 2] = (
        value  # in the directory and in front of the member
    )
    path.write_bytes(content)
    with pytest.raises(
        BundleError, match=r"b\.zip: damaged, or no bundle of a table \(\w+: [^\n]+\)$"
    ):
        verify_bundle(path)


def test_a_member_more_or_less_and_no_bundle_are_refused(bundle: Path) -> None:
    with zipfile.ZipFile(bundle, "a") as archive:
        archive.writestr("more.txt", "")
    with pytest.raises(BundleError, match=f"more.txt: not listed in {METADATA}"):
        verify_bundle(bundle)
    bundle.write_text("text")
    done = CliRunner().invoke(app, ["verify", str(bundle)])
    assert done.exit_code != 0
