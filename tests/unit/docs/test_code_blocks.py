"""Code blocks of the documents: commands are parsed by their program, configs composed, and Python run.

Pages in STORIES have a test of their own, which runs their blocks in order. Shell commands of the other pages are run
in tests/workflow/test_shell_blocks.py if they can be run there, and only parsed here.
"""

from __future__ import annotations

import asyncio
import re
import runpy
import shlex
import textwrap
import tomllib
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from snakemake.cli import get_argument_parser
from typer.exceptions import TyperException

from mcore_mas.cli.arguments import UsageError
from mcore_mas.cli.main import app
from mcore_mas.config.compose import resolve
from mcore_mas.config.experiments import CONFIGS
from mcore_mas.config.run import RunConfig
from mcore_mas.pipeline.suite import Suite
from rollout.base.ownership import FolderError
from tests.support.documents import BLOCKS, ROOT, STORIES
from tests.support.own_engine import OWN_ENGINE

CHECKED_BLOCKS = [block for block in BLOCKS if block.page not in STORIES]
# Blocks that tests/workflow/test_scaffold.py checks in a new project.
BLOCKS_OF_A_NEW_PROJECT = {"cluster-8"}


def blocks(language: str) -> list[Any]:
    """Return the name and body of each block in a language, as parameters of a test."""
    return [
        pytest.param(block.name, block.body, id=block.name)
        for block in CHECKED_BLOCKS
        if block.language == language and block.name not in BLOCKS_OF_A_NEW_PROJECT
    ]


def shell_commands() -> list[Any]:
    """Return the lines of all shell blocks, as parameters of a test."""
    parameters: list[Any] = []
    for block in CHECKED_BLOCKS:
        if block.language == "sh":
            parameters += [
                pytest.param(line, id=f"{block.name}: {line[:50]}") for line in block.lines
            ]
    return parameters


def test_every_block_has_a_checked_language_and_every_story_its_test() -> None:
    """Blocks without a language show files, messages and diagrams; they need no check."""
    assert {block.language for block in BLOCKS} == {"", "sh", "python", "yaml", "toml", "mermaid"}
    for page, test in STORIES.items():
        name = page.removesuffix(".md")
        code = (ROOT / "tests" / test).read_text()
        assert name in code or name.upper() in code, page


# Each command is parsed by its program.


def check_mcore_mas(words: list[str]) -> None:
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):  # a group of commands
        command = command.commands[words[0]]
        words = words[1:]
    # The runs that a page names do not exist here.
    with suppress(FolderError, UsageError):
        command.make_context(command.name, words)  # parses the words, and runs nothing


def check_snakemake(words: list[str]) -> None:
    arguments = get_argument_parser().parse_args(words)
    files = [*(ROOT / "workflow").rglob("*.smk"), ROOT / "workflow/Snakefile"]
    rules = "".join(file.read_text() for file in files)
    for target in arguments.targets:
        if target.startswith("results/"):
            continue
        # Rules such as table_drmas_1 are made in a loop, with a name from an f-string.
        name_in_loop = re.sub(r"^(table|bundle|acquire)_\w+$", r'f"\1_{name}"', target)
        assert name_in_loop in rules or f"rule {target}:" in rules, target


def check_make(words: list[str]) -> None:
    targets = [word for word in words if "=" not in word]
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert all(f"\n{target}:" in makefile for target in targets), targets


def check_python(words: list[str]) -> None:
    assert words[0] == "-m", words
    # Looking for pip would switch off setuptools' copy of distutils in this process.
    assert words[1] == "pip" or find_spec(words[1]), words


def check_other_program(words: list[str]) -> None:
    """Check that the files exist that another program reads."""
    files = [word for word in words if re.fullmatch(r"[\w/-]+\.(yml|sh|txt)", word)]
    assert all((ROOT / file).is_file() for file in files), files


COMMANDS = {
    "mcore-mas": check_mcore_mas,
    "snakemake": check_snakemake,
    "make": check_make,
    "python": check_python,
    "python3.12": check_python,
}
OTHER_PROGRAMS = {
    *("bash", "cat", "cd", "conda", "curl", "export", "ray", "rm", "tail"),
    *("job=$(squeue", "scancel", "sinfo", "squeue"),  # Slurm
    "run",  # .ci/run
}


@pytest.mark.parametrize("line", shell_commands())
def test_a_command_is_accepted_by_its_program(line: str) -> None:
    for command in line.split(" && "):
        words = shlex.split(command, comments=True)
        name = words[0].rpartition("/")[2]
        assert name in COMMANDS or name in OTHER_PROGRAMS, name
        COMMANDS.get(name, check_other_program)(words[1:])


@pytest.mark.parametrize(
    "line",
    [
        "mcore-mas shwo x",
        "mcore-mas show x --indx 3",
        "snakemake tabel_x",
        "make demos",
        "python -m nothing",
    ],
)
def test_a_command_that_its_program_refuses_fails_the_check(line: str) -> None:
    with pytest.raises((KeyError, AssertionError, TyperException)):
        test_a_command_is_accepted_by_its_program(line)


# Each config is composed, with overrides for the settings that its block leaves out.

REQUIRED_SECTIONS = [
    "+data={generator: arithmetic, train: 9, validation: 2, test: 2}",
    "+evaluation={}",
    "+trainer={steps: 1, tasks_per_step: 2, group_size: 2}",
]
MODEL = "policy_defaults={model: models/m, lr: 1e-6}"
OVERRIDES = {  # by the name of the block that needs them
    "configuration-5": REQUIRED_SECTIONS,
    "configuration-6": ["cold_start=null"],
    "configuration-7": ["cold_start=null", "data.generator=null"],
    "configuration-9": ["~experiment", *REQUIRED_SECTIONS, "+run=x", "team=duel"],
    "configuration-10": ["experiment=demo_poker"],
    "credit-2": ["experiment=demo_search"],
    "credit-6": [
        "~experiment",
        *REQUIRED_SECTIONS,
        MODEL,
        "team=m_ask",
        "sharing=separate",
        "+retriever={}",
    ],
    "engines-0": ["cluster.device=auto"],
    "engines-2": ["~experiment", *REQUIRED_SECTIONS, "team=solver_verifier"],
    "gateway-0": ["~experiment", *REQUIRED_SECTIONS, MODEL, "sharing=shared", "+run=x"],
    "lora-2": ["policies.solver.tp=1"],
    "lora-3": ["policies.solver.tp=1"],
    "cluster-15": ["engine=sglang", "engine.python=python"],
}


def test_overrides_belong_to_existing_blocks() -> None:
    assert set(OVERRIDES) <= {block.name for block in BLOCKS if block.language == "yaml"}


def compose_block(values: dict[str, Any], *overrides: str) -> None:
    """Compose the sections of a block into demo_math, or into the experiment that an override chooses."""
    choices = []
    for default in values.pop("defaults", ()):
        for group, name in default.items():
            choices.append(f"{group.removeprefix('override /')}={name}")
    if not any("experiment" in override for override in overrides):
        choices = ["experiment=demo_math", *choices]
    resolve([*choices, *overrides], sections={"run": "block", **values})


def compose_file(group: str, name: str, body: str, configs: Path, overrides: list[str]) -> None:
    """Write a block as configs/GROUP/NAME.yaml, and compose the config or the rows of its grid."""
    file = configs / group / f"{name}.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(body)
    names = [name]
    if "grid:" in body:
        names = ["ours_small_shared", "ours_large_separate", "ours_rloo"]
    for row in names:
        resolve([*overrides, f"{group}={row}"], configs)


@pytest.mark.parametrize(("name", "body"), blocks("yaml"))
def test_a_config_composes(
    name: str, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path_comment = re.search(r"^# configs/(\w+)/(\w+)\.yaml", body, re.MULTILINE)
    if body.startswith("suite:"):
        Suite.load(yaml.safe_load(body), tmp_path)
    elif path_comment:
        group, config_name = path_comment.groups()
        compose_file(group, config_name, body, tmp_path / "configs", OVERRIDES[name])
    elif body.startswith("- {"):
        # These are edges of a shipped team's graph.
        shipped_teams = "".join(file.read_text() for file in (CONFIGS / "team").glob("*.yaml"))
        assert all(line in shipped_teams for line in body.splitlines()), body
    else:
        # A block with several engines has one config per line.
        configs = body.splitlines() if "\nengine:" in body else [body]
        for text in configs:
            values = yaml.safe_load(text.replace("my_pkg.engines:Mine", OWN_ENGINE))
            compose_block(values, *OVERRIDES.get(name, []))


@pytest.mark.parametrize(("name", "body"), blocks("toml"))
def test_entry_points_name_an_existing_group(name: str, body: str) -> None:
    (group,) = tomllib.loads(body)["project"]["entry-points"]
    assert group.removeprefix("mcore_mas.") in (ROOT / "rollout/base/lookup.py").read_text()


# Each Python block is run, with the names that it expects.

# End of the output of each block.
OUTPUTS = {"sandbox-0": "{'data/train.csv': 8}\n", "coaches-1": "", "gateway-2": ""}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_python_block_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "no-call-is-made")
    (body,) = [block.body for block in CHECKED_BLOCKS if block.name == name]
    config = RunConfig.from_values(resolve(["experiment=demo_math", "coach=openai"]), "a test")
    expected_names: dict[str, Any] = {"config": config, "folder": tmp_path}
    expected_names |= dict.fromkeys(("Task", "TeamSession", "Env"), object)
    script = tmp_path / "block.py"
    script.write_text(f"async def block(groups=()):\n{textwrap.indent(body, '    ')}")
    block = runpy.run_path(str(script), expected_names)["block"]
    asyncio.run(block())
    assert capsys.readouterr().out.endswith(OUTPUTS[name])


def test_code_for_users_imports_public_names_only() -> None:
    scaffold = (ROOT / "mcore_mas/pipeline/scaffold").rglob("*.txt")
    notebooks = (ROOT / "docs/notebooks").glob("*.ipynb")
    texts = {file.name: file.read_text() for file in (*scaffold, *notebooks)}
    texts |= {block.name: block.body for block in BLOCKS if block.language == "python"}
    assert {"team.py.txt", "quickstart-1", "first_team.ipynb"} <= set(texts)
    assert any(name.startswith("own_team") for name in texts)
    inner_imports = {}
    for name, text in texts.items():
        imports = re.findall(r"\b(?:from|import) mcore_mas\.[\w.]+", text)
        if imports:
            inner_imports[name] = imports
    assert inner_imports == {}


def test_every_python_block_is_run_by_a_test() -> None:
    """The README's block is run by tests/workflow/test_quickstart.py."""
    python_blocks = {block.name for block in CHECKED_BLOCKS if block.language == "python"}
    assert python_blocks == {*OUTPUTS, "README-1"}
