"""Files that the documents name are there. tests/unit/test_site.py checks their links."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from mcore_mas.pipeline.suite import Suite
from tests.support.documents import GENERATED, PAGES

ROOT = Path(__file__).resolve().parents[2]
BASES = (
    ROOT,
    ROOT / "mcore_mas",
    ROOT / "mcore_mas/megatron",
)  # a path may leave out the package of its sentence
FOLDERS = {path.name for base in BASES for path in base.iterdir() if path.is_dir()} - {
    "results",
    "data",
    "models",
}
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
    spans = re.findall(
        r"(?<!`)`([^`\s{}<>*:$…]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    )
    named = [
        span for span in spans if re.search(r"(\.(py|md|yaml|yml|smk|txt|csv|json|jsonl)|/)$", span)
    ]
    return sorted(
        {span for span in named if re.fullmatch(r"\w+\.py", span) or span.split("/")[0] in FOLDERS}
        - ELSEWHERE
    )


def is_there(path: str) -> bool:
    return path in CODE or any((base / path).exists() for base in BASES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_exists(page: Path) -> None:
    assert not [path for path in paths_of(page.read_text(encoding="utf-8")) if not is_there(path)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_links_to_a_generated_one(page: Path) -> None:
    """On GitHub there are none; commands.md says how to make or print them."""
    links = re.findall(r"\]\((?:docs/)?([\w/]+\.md)[)#]", page.read_text(encoding="utf-8"))
    assert not [link for link in links if link in GENERATED]


def test_the_names_of_the_glossary_are_defined_where_it_says() -> None:
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| `([\w.]+)` \| `([\w/.]+)` \|$", page, re.MULTILINE)
    assert len(rows) > 40
    for term, name, path in rows:
        code = (ROOT / path).read_text(encoding="utf-8")
        last = re.escape(name.rpartition(".")[2])
        assert re.search(rf"\b(class|def) {last}\b|^ *{last}\b *[:=]", code, re.MULTILINE), term


def test_what_is_not_there_is_seen() -> None:
    assert paths_of("# A head\n[a](c.md) `docs/e.md`\n") == ["docs/e.md"]
    assert not is_there("docs/e.md")
    assert is_there("docs/glossary.md")


def test_who_cites_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (
        cited["version"]
        == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    )


def test_recipes_of_containers_use_files_that_are_there() -> None:
    for recipe in (ROOT / "containers").iterdir():
        used = re.findall(
            r"\b(?:requirements|containers|environment)[\w./-]*\.\w+",
            recipe.read_text(encoding="utf-8"),
        )
        assert len(used) > 1 and not [file for file in used if not (ROOT / file).is_file()], used


def test_recipes_of_containers_are_of_steps_that_a_shell_takes() -> None:
    """No container can be built in a test: the files' instructions, and their commands as a shell reads them."""
    steps = []
    for name, kinds in (("Dockerfile", "FROM RUN"), ("gpu.Dockerfile", "FROM ARG")):
        docker = (ROOT / "containers" / name).read_text().splitlines()
        own = [line.partition(" ") for line in docker if not line.startswith("#")]
        last = (
            ["WORKDIR", "ENTRYPOINT"] if name == "Dockerfile" else ["ENV", "WORKDIR", "ENTRYPOINT"]
        )
        assert [step for step, _, _ in own] == [
            *kinds.split(),
            "COPY",
            "WORKDIR",
            "RUN",
            "RUN",
            *last,
        ]
        steps += own
    head, *sections = re.split(
        r"^%(\w+)\n", (ROOT / "containers/gpu.def").read_text(), flags=re.MULTILINE
    )
    assert re.findall(r"^(\w+): \S", head, re.MULTILINE) == ["Bootstrap", "From"]
    assert sections[::2] == ["arguments", "files", "post", "environment", "runscript"]
    for commands in [*(words for step, _, words in steps if step == "RUN"), *sections[5::2]]:
        assert (
            subprocess.run(["bash", "-n"], input=commands, text=True, check=False).returncode == 0
        ), commands


def test_both_images_for_gpus_are_of_one_base_and_the_same_two_stages() -> None:
    """Their base, CUDA line and commands, but for what an image's layers and Apptainer's templates want."""
    docker = (ROOT / "containers/gpu.Dockerfile").read_text()
    apptainer = (ROOT / "containers/gpu.def").read_text()
    (base,) = re.findall(r"^FROM (\S+)", docker, re.MULTILINE)
    assert f"From: {base}\n" in apptainer
    assert (
        re.findall(r"^(?:ARG|   ) (CUDA=\d+)$", docker + apptainer, re.MULTILINE) == ["CUDA=13"] * 2
    )
    stages = r"(conda env create \S+ \S+|conda run .*)"
    assert re.findall(stages, docker.replace(" && conda clean --all --yes", "")) == re.findall(
        stages, apptainer
    )
    assert "CUDA=$CUDA conda run" in docker and "CUDA={{ CUDA }} conda run" in apptainer
    (name,) = re.findall(r"^name: (\S+)", (ROOT / "environment.yml").read_text(), re.MULTILINE)
    for recipe in (docker, apptainer):
        assert f"--name {name} " in recipe and f"PATH=/opt/conda/envs/{name}/bin:$PATH" in recipe


def test_a_catalog_of_workflows_finds_what_it_asks_for() -> None:
    """Snakemake's catalog lists a workflow under *standardized usage* by these files."""
    assert all(
        (ROOT / name).is_file() for name in ("workflow/Snakefile", "config/README.md", "README.md")
    )
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert usage.keys() == {"mandatory-flags", "software-stack-deployment", "report"}
    assert (
        usage["mandatory-flags"].keys() == {"desc", "flags"}
        and (ROOT / "environment.yml").is_file()
    )
    (suite,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "config/README.md").read_text(), flags=re.DOTALL
    )
    assert list(Suite.load(yaml.safe_load(suite), ROOT).runs) == ["my_math", "my_math_grpo"]


def test_forms_of_issues_are_as_github_takes_them() -> None:
    for file in (ROOT / ".github/ISSUE_TEMPLATE").iterdir():
        form = yaml.safe_load(file.read_text())
        assert (
            form["name"]
            and form["description"]
            and form.keys() <= {"name", "description", "title", "labels", "body"}
        )
        ids = [field["id"] for field in form["body"]]
        assert len({*ids}) == len(ids) and all(re.fullmatch(r"[\w-]+", one) for one in ids)
        for field in form["body"]:
            assert (
                field.keys() <= {"type", "id", "attributes", "validations"}
                and field["type"] == "textarea"
            )
            taken = {"label", "description", "placeholder", "value", "render"}
            assert field["attributes"]["label"] and field["attributes"].keys() <= taken
            assert field.get("validations", {"required": True}) == {"required": True}


def test_commits_are_checked_by_programs_of_the_environment() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local" and [hook["id"] for hook in local["hooks"]] == [
        "ruff",
        "format",
        "snakefmt",
    ]
    lint = (ROOT / "Makefile").read_text()
    for hook in local["hooks"]:
        assert hook["entry"].removeprefix(".venv/bin/") in lint.replace("$(BIN)/", ""), hook
