"""Files that the documents name are there. tests/unit/test_site.py checks their links."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BASES = (ROOT, ROOT / "mcore_mas", ROOT / "mcore_mas/megatron")  # a path may leave out the package of its sentence
FOLDERS = {path.name for base in BASES for path in base.iterdir() if path.is_dir()} - {"results", "data", "models"}
CODE = {
    path.name
    for top in ("mcore_mas", "rollout", "retrieval", "workflow", "tests")
    for path in (ROOT / top).rglob("*.py")
}
ELSEWHERE = {
    "configs/team/relay.yaml",
    "configs/experiment/my_team.yaml",
    "configs/base_config.yaml",
}  # of users, of ALFWorld


def paths_of(text: str) -> list[str]:
    """Backticked paths of the repository: files in its folders, folders with a slash at the end, names of modules."""
    spans = re.findall(r"(?<!`)`([^`\s{}<>*:$…]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    named = [span for span in spans if re.search(r"(\.(py|md|yaml|yml|smk|txt|csv|json|jsonl)|/)$", span)]
    return sorted(
        {span for span in named if re.fullmatch(r"\w+\.py", span) or span.split("/")[0] in FOLDERS} - ELSEWHERE
    )


def is_there(path: str) -> bool:
    return path in CODE or any((base / path).exists() for base in BASES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_exists(page: Path) -> None:
    assert not [path for path in paths_of(page.read_text(encoding="utf-8")) if not is_there(path)]


def test_what_is_not_there_is_seen() -> None:
    assert paths_of("# A head\n[a](c.md) `docs/e.md`\n") == ["docs/e.md"]
    assert not is_there("docs/e.md")
    assert is_there("docs/glossary.md")


def test_who_cites_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_recipes_of_containers_use_files_that_are_there() -> None:
    for recipe in (ROOT / "containers").iterdir():
        used = re.findall(r"\b(?:requirements|containers|environment)[\w./-]*\.\w+", recipe.read_text(encoding="utf-8"))
        assert len(used) > 1 and not [file for file in used if not (ROOT / file).is_file()], used
