"""Bundles of tables: their content, their verification, and errors of changed or malicious ones."""

from __future__ import annotations

import hashlib
import json
import zipfile
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
    """Return a bundle of MARTI's table of test-time RL with one task.

    The debate solves the task in one of two samples, the single agent in none.
    """
    results = tmp_path / "results"
    model = results / "models" / "m"
    file = results / "data" / "aime.jsonl"
    index = results / "wiki" / "vectors.index"
    encoder = results / "models" / "e5" / "encoder.safetensors"
    inputs = {
        model / "config.json": "{}",
        model / "model.safetensors": "weights",
        file: "rows",
        index: "vectors",
        encoder: "encoder",
    }
    for path, text in inputs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    evaluations = {}
    for run, seed, commit, scores in (
        ("marti_single_ttrl", 42, "single", [0.0, 0.0]),
        ("marti_debate_ttrl", 1, "debate", [1.0, 0.0]),
    ):
        metrics = {"avg@2": sum(scores) / 2, "pass@2": max(scores)}
        tasks = [{"task_id": "a/0", "source": "aime_2024", "scores": scores, "metrics": metrics}]
        content = {
            "run": run,
            "state": "trained",
            "k": 2,
            "commit": commit,
            "replies": 2,
            "overlong": 0,
            "cut": 0,
            "failed": {},
        }
        path = results / run / "evaluation" / "trained.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**content, "rows": [], "tasks": tasks}))
        config = CONFIG.format(
            seed=seed,
            model=model,
            file=file,
            index=index.parent,
            encoder=encoder.parent,
        )
        (results / run / "config.yaml").write_text(config)
        evaluations[f"{run}/trained"] = [str(path)]
    write_paper_table("marti_ttrl", evaluations, results / "tables" / "marti_ttrl.md", scale="tiny")
    out = results / "tables" / "marti_ttrl.bundle.zip"
    make_bundle(out.with_name("marti_ttrl.json"), out)
    return out


def read_members(bundle: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(bundle) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def replace_in_member(
    bundle: Path, name: str, old: bytes, new: bytes, *, update_description: bool
) -> Path:
    """Write the bundle with another text in a member; return its path.

    Args:
        update_description: also write the member's new digest and size into the bundle's description.
    """
    contents = read_members(bundle)
    contents[name] = contents[name].replace(old, new)
    if update_description:
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


def test_a_bundle_names_the_inputs_of_its_table(bundle: Path) -> None:
    contents = read_members(bundle)
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
    assert inputs["aime.jsonl"]["bytes"] == 4
    assert sorted(inputs) == [
        "aime.jsonl",
        "config.json",
        "encoder.safetensors",
        "model.safetensors",
        "vectors.index",
    ]
    # The digest of the code covers templates and the Snakefile too
    root = Path(__file__).parents[3]
    folders = ("mcore_mas", "rollout", "retrieval", "configs", "workflow")
    code_files = [file for folder in folders for file in (root / folder).rglob("*")]
    count = sum(file.is_file() and file.parent.name != "__pycache__" for file in code_files)
    assert json.loads(contents["inputs.json"])["code"]["files"] == str(count)
    # The seeds and commits of the runs
    assert b"seeds 1, 42; commit debate, single." in contents["table.md"]
    assert "ours agrees" in json.loads(contents["made.json"])["tolerance"]
    graph = {entity["@id"]: entity for entity in json.loads(contents[METADATA])["@graph"]}
    assert graph[METADATA]["conformsTo"] == {"@id": "https://w3id.org/ro/crate/1.1"}
    assert {"name", "description", "datePublished", "license", "hasPart"} < graph["./"].keys()
    assert graph["table.csv"]["sha256"] == hashlib.sha256(contents["table.csv"]).hexdigest()
    assert graph["#making"]["result"] == [{"@id": "table.csv"}, {"@id": "table.md"}]


def test_a_bundle_is_verified_in_another_folder(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_folder = tmp_path / "elsewhere"
    other_folder.mkdir()
    bundle.replace(other_folder / "b.zip")
    (tmp_path / "results").rename(tmp_path / "gone")
    monkeypatch.chdir(other_folder)
    result = CliRunner().invoke(app, ["verify", "b.zip"])
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "b.zip: 11 files as described; the table of 2 evaluations is what their per-task scores"
    )
    assert list(other_folder.iterdir()) == [other_folder / "b.zip"]


def test_a_flipped_byte_is_refused(bundle: Path) -> None:
    content = bundle.read_bytes()
    with zipfile.ZipFile(bundle) as archive:
        # A member's content follows its header of 30 bytes and its name.
        starts = [info.header_offset + 30 + len(info.filename) for info in archive.infolist()]
    for start in starts:
        damaged = bytearray(content)
        damaged[start + 9] ^= 1
        bundle.write_bytes(damaged)
        with pytest.raises(BundleError, match="damaged, or no bundle of a table"):
            verify_bundle(bundle)


DEBATE = "runs/marti_debate_ttrl/evaluation/trained.json"


@pytest.mark.parametrize(
    ("name", "old", "new", "update_description", "message"),
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
        (METADATA, b'"contentSize": "', b'"contentSize": "9', False, "has .* bytes, and .* says 9"),
    ],
)
def test_a_changed_member_is_named_with_its_difference(
    bundle: Path, name: str, old: bytes, new: bytes, update_description: bool, message: str
) -> None:
    changed = replace_in_member(bundle, name, old, new, update_description=update_description)
    with pytest.raises(BundleError, match=message):
        verify_bundle(changed)


def test_a_member_that_would_fill_the_memory_is_refused_before_it_is_unpacked(
    tmp_path: Path,
) -> None:
    path = tmp_path / "b.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ro-crate-metadata.json", b"{ }")
        archive.writestr("scores.json", b"0" * 1000)
    # The archive's directory claims 4,294,967,294 bytes instead of 1000.
    content = bytearray(path.read_bytes())
    offset = content.rindex((1000).to_bytes(4, "little"))
    content[offset : offset + 4] = (2**32 - 2).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"4\.3 GB unpacked, and a bundle has at most 4\.3 GB"):
        verify_bundle(path)


DAMAGED = r"b\.zip: damaged, or no bundle of a table \(\w+Error: [^\n]+\)$"
DEEP = b"[" * 200_000
MADE = b'{"evaluations": {"a": ["e.json"]}}'


@pytest.mark.parametrize(
    "description", [b'{"@graph": ["x"]}', b'{"@graph": null}', b"[1]", b"5", DEEP, b"\xff"]
)
def test_an_invalid_description_is_refused_in_one_line(description: bytes, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr(METADATA, description)
    with pytest.raises(BundleError, match=DAMAGED):
        verify_bundle(tmp_path / "b.zip")


def write_described(path: Path, members: dict[str, bytes]) -> None:
    """Write a zip file of these members with a description that has their digests and sizes."""
    files = [
        {
            "@id": name,
            "@type": "File",
            "sha256": hashlib.sha256(content).hexdigest(),
            "contentSize": str(len(content)),
        }
        for name, content in members.items()
    ]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(METADATA, json.dumps({"@graph": files}))
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)


@pytest.mark.parametrize(
    "members",
    [
        {"a": b"", "a/b": b""},  # a file and a folder with the same name
        {"a" * 300: b""},
        {".": b""},
        {"made.json": b'{"evaluations": []}'},
        {"made.json": DEEP},
        {"made.json": MADE, "e.json": b'{"k": 1, "tasks": [{"scores": ["x"]}]}'},
    ],
)
def test_malicious_members_are_refused_in_one_line(
    members: dict[str, bytes], tmp_path: Path
) -> None:
    write_described(tmp_path / "b.zip", members)
    with pytest.raises(BundleError, match=DAMAGED):
        verify_bundle(tmp_path / "b.zip")


@pytest.mark.parametrize("name", ["../made.json", "/tmp/made.json", "runs/../../made.json"])
def test_a_member_outside_of_the_bundle_is_refused(name: str, tmp_path: Path) -> None:
    write_described(tmp_path / "b.zip", {name: b"{}"})
    with pytest.raises(BundleError, match=f"{name}: leads out of the bundle's folder"):
        verify_bundle(tmp_path / "b.zip")


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (8, 1),  # encrypted
        (10, 99),  # an unknown compression
        (10, 14),  # LZMA
        (10, 12),  # bzip2
    ],
)
def test_a_member_that_cannot_be_unpacked_is_refused_in_one_line(
    offset: int, value: int, tmp_path: Path
) -> None:
    path = tmp_path / "b.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(METADATA, "{}")
    content = bytearray(path.read_bytes())
    # The field is in the archive's directory, and two bytes earlier in the member's header.
    content[content.rfind(b"PK\x01\x02") + offset] = value
    content[offset - 2] = value
    path.write_bytes(content)
    message = r"b\.zip: damaged, or no bundle of a table \(\w+: [^\n]+\)$"
    with pytest.raises(BundleError, match=message):
        verify_bundle(path)


def test_an_unlisted_member_and_a_text_file_are_refused(bundle: Path) -> None:
    with zipfile.ZipFile(bundle, "a") as archive:
        archive.writestr("more.txt", "")
    with pytest.raises(BundleError, match=f"more.txt: not listed in {METADATA}"):
        verify_bundle(bundle)
    bundle.write_text("text")
    result = CliRunner().invoke(app, ["verify", str(bundle)])
    assert result.exit_code != 0
