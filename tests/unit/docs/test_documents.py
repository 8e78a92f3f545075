"""Files that the documentation names exist, and so do those of containers, forms and hooks.

tests/unit/docs/test_site.py checks the links.
"""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from mcore_mas.pipeline.suite import Suite
from tests.support.documents import GENERATED, PAGES

ROOT = Path(__file__).resolve().parents[3]
# Paths may be relative to these folders.
BASES = (ROOT, ROOT / "mcore_mas", ROOT / "mcore_mas/megatron")
# Files of users and of ALFWorld
OTHER_FILES = {
    "configs/team/relay.yaml",
    "configs/experiment/my_team.yaml",
    "configs/base_config.yaml",
}


def folder_names() -> set[str]:
    """Return the names of the folders that a path may begin with."""
    names: set[str] = set()
    for base in BASES:
        names |= {path.name for path in base.iterdir() if path.is_dir()}
    return names - {"results", "data", "models"}


def module_files() -> set[str]:
    """Return the file names of all modules."""
    names: set[str] = set()
    for folder in ("mcore_mas", "rollout", "retrieval", "workflow", "tests"):
        names |= {path.name for path in (ROOT / folder).rglob("*.py")}
    return names


FOLDERS = folder_names()
MODULES = module_files()


def paths_of(text: str) -> list[str]:
    """Return the paths of the repository in backticks: files, folders with a slash at the end, and module files."""
    without_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    paths = set()
    for span in re.findall(r"(?<!`)`([^`\s{}<>*:$…]+)`", without_blocks):
        is_path = re.search(r"(\.(py|md|yaml|yml|smk|txt|csv|json|jsonl)|/)$", span)
        is_module = re.fullmatch(r"\w+\.py", span)
        if is_path and (is_module or span.split("/")[0] in FOLDERS):
            paths.add(span)
    return sorted(paths - OTHER_FILES)


def exists(path: str) -> bool:
    return path in MODULES or any((base / path).exists() for base in BASES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_exists(page: Path) -> None:
    assert not [path for path in paths_of(page.read_text(encoding="utf-8")) if not exists(path)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_links_to_a_generated_page(page: Path) -> None:
    """Generated pages are not on GitHub; commands.md names the commands that make or print them."""
    links = re.findall(r"\]\((?:docs/)?([\w/]+\.md)[)#]", page.read_text(encoding="utf-8"))
    assert not [link for link in links if link in GENERATED]


def test_the_names_of_the_glossary_are_defined_in_its_files() -> None:
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| `([\w.]+)` \| `([\w/.]+)` \|$", page, re.MULTILINE)
    assert len(rows) > 40
    for term, name, path in rows:
        code = (ROOT / path).read_text(encoding="utf-8")
        last = re.escape(name.rpartition(".")[2])
        assert re.search(rf"\b(class|def) {last}\b|^ *{last}\b *[:=]", code, re.MULTILINE), term


def test_a_missing_file_is_noticed() -> None:
    assert paths_of("# A head\n[a](c.md) `docs/e.md`\n") == ["docs/e.md"]
    assert not exists("docs/e.md")
    assert exists("docs/glossary.md")


def test_the_citation_has_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"]


def test_recipes_of_containers_use_files_that_exist() -> None:
    for recipe in (ROOT / "containers").iterdir():
        text = recipe.read_text(encoding="utf-8")
        files = re.findall(r"\b(?:requirements|containers|environment)[\w./-]*\.\w+", text)
        assert len(files) > 1, recipe
        assert not [file for file in files if not (ROOT / file).is_file()], recipe


def assert_shell_parses(commands: str) -> None:
    shell = subprocess.run(["bash", "-n"], input=commands, text=True, check=False)
    assert shell.returncode == 0, commands


@pytest.mark.parametrize(
    ("name", "instructions"),
    [
        ("Dockerfile", "FROM RUN COPY WORKDIR RUN RUN WORKDIR ENTRYPOINT"),
        ("gpu.Dockerfile", "FROM ARG COPY WORKDIR RUN RUN ENV WORKDIR ENTRYPOINT"),
    ],
)
def test_dockerfiles_have_valid_commands(name: str, instructions: str) -> None:
    """No image can be built in a test, so that only the instructions and the shell's syntax are checked."""
    lines = (ROOT / "containers" / name).read_text().splitlines()
    steps = [line.partition(" ") for line in lines if not line.startswith("#")]
    assert [instruction for instruction, _, _ in steps] == instructions.split()
    for instruction, _, arguments in steps:
        if instruction == "RUN":
            assert_shell_parses(arguments)


def test_the_apptainer_recipe_has_valid_commands() -> None:
    recipe = (ROOT / "containers/gpu.def").read_text()
    head, *names_and_texts = re.split(r"^%(\w+)\n", recipe, flags=re.MULTILINE)
    assert re.findall(r"^(\w+): \S", head, re.MULTILINE) == ["Bootstrap", "From"]
    sections = dict(zip(names_and_texts[::2], names_and_texts[1::2], strict=True))
    assert list(sections) == ["arguments", "files", "post", "environment", "runscript"]
    for name in ("post", "environment", "runscript"):
        assert_shell_parses(sections[name])


def test_both_images_for_gpus_have_the_same_base_and_commands() -> None:
    """They differ only in the syntax of Docker's layers and Apptainer's templates."""
    docker = (ROOT / "containers/gpu.Dockerfile").read_text()
    apptainer = (ROOT / "containers/gpu.def").read_text()
    (base,) = re.findall(r"^FROM (\S+)", docker, re.MULTILINE)
    assert f"From: {base}\n" in apptainer
    cuda_versions = re.findall(r"^(?:ARG|   ) (CUDA=\d+)$", docker + apptainer, re.MULTILINE)
    assert cuda_versions == ["CUDA=13"] * 2

    command = re.compile(r"(conda env create \S+ \S+|conda run .*)")
    docker_commands = command.findall(docker.replace(" && conda clean --all --yes", ""))
    assert docker_commands == command.findall(apptainer)
    assert "CUDA=$CUDA conda run" in docker
    assert "CUDA={{ CUDA }} conda run" in apptainer

    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["name"]
    for recipe in (docker, apptainer):
        assert f"--name {environment} " in recipe
        assert f"PATH=/opt/conda/envs/{environment}/bin:$PATH" in recipe


def test_snakemakes_catalog_finds_the_files_that_it_requires() -> None:
    """With these files the catalog lists a workflow under *standardized usage*."""
    for name in ("workflow/Snakefile", "config/README.md", "README.md", "environment.yml"):
        assert (ROOT / name).is_file()
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert usage.keys() == {"mandatory-flags", "software-stack-deployment", "report"}
    assert usage["mandatory-flags"].keys() == {"desc", "flags"}
    config_page = (ROOT / "config/README.md").read_text()
    (suite,) = re.findall(r"```yaml\n(.*?)```", config_page, flags=re.DOTALL)
    assert list(Suite.load(yaml.safe_load(suite), ROOT).runs) == ["my_math", "my_math_grpo"]


def test_issue_forms_have_the_keys_that_github_accepts() -> None:
    for file in (ROOT / ".github/ISSUE_TEMPLATE").iterdir():
        form = yaml.safe_load(file.read_text())
        assert form["name"]
        assert form["description"]
        assert form.keys() <= {"name", "description", "title", "labels", "body"}
        ids = [field["id"] for field in form["body"]]
        assert len(set(ids)) == len(ids)
        for field in form["body"]:
            assert re.fullmatch(r"[\w-]+", field["id"])
            assert field["type"] == "textarea"
            assert field.keys() <= {"type", "id", "attributes", "validations"}
            attributes = field["attributes"]
            assert attributes["label"]
            assert attributes.keys() <= {"label", "description", "placeholder", "value", "render"}
            assert field.get("validations", {"required": True}) == {"required": True}


def test_commit_hooks_are_commands_of_make_lint() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    assert [hook["id"] for hook in local["hooks"]] == ["ruff", "format", "snakefmt"]
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)/", "")
    for hook in local["hooks"]:
        assert hook["entry"].removeprefix(".venv/bin/") in makefile, hook
