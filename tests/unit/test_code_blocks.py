"""Every code block of the documents is run, composed into a config, or parsed by its program.

Some pages have a test of their own that runs their blocks in order. Commands of the others are run in
tests/workflow/test_shell_blocks.py, as far as they can be run there; the rest is checked here.
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

LINES = [  # commands of shell blocks
    pytest.param(line, id=f"{block.name}: {line[:50]}")
    for block in BLOCKS
    if block.language == "sh" and block.page not in STORIES
    for line in block.lines
]


OF_A_NEW_PROJECT = {"cluster-8"}  # tests/workflow/test_scaffold.py puts it into one


def blocks(language: str) -> list[Any]:
    return [
        pytest.param(block.name, block.body, id=block.name)
        for block in BLOCKS
        if block.language == language
        and block.page not in STORIES
        and block.name not in OF_A_NEW_PROJECT
    ]


def test_no_block_is_left_out() -> None:
    """Blocks without a language show files, messages and diagrams."""
    assert {block.language for block in BLOCKS} == {"", "sh", "python", "yaml", "toml", "mermaid"}
    for page, test in STORIES.items():
        words = (
            page.removesuffix(".md"),
            f"{page.removesuffix('.md')}.md",
            f"{page.removesuffix('.md').upper()}",
        )
        assert any(word in (ROOT / "tests" / test).read_text() for word in words), page


# Commands are parsed by their program.


def check_mcore_mas(words: list[str]) -> None:
    command = typer.main.get_command(app)
    while commands := getattr(command, "commands", None):
        command, words = commands[words[0]], words[1:]
    with suppress(FolderError, UsageError):  # the runs that a page names do not exist here
        command.make_context(command.name, words)  # parse, and do not run


def check_snakemake(words: list[str]) -> None:
    given = get_argument_parser().parse_args(words)
    rules = "".join(
        file.read_text()
        for file in [*(ROOT / "workflow").rglob("*.smk"), ROOT / "workflow/Snakefile"]
    )
    for target in given.targets:
        named = re.sub(r"^(table|bundle|acquire)_\w+$", r'f"\1_{name}"', target)
        assert target.startswith("results/") or named in rules or f"rule {target}:" in rules, target


def check_make(words: list[str]) -> None:
    targets = [word for word in words if "=" not in word]
    assert targets and all(
        f"\n{target}:" in (ROOT / "Makefile").read_text() for target in targets
    ), targets


def check_python(words: list[str]) -> None:
    # whoever looks for pip switches off setuptools' own distutils, in the whole process
    assert words[0] == "-m" and (words[1] == "pip" or find_spec(words[1])), words


def check_other_program(words: list[str]) -> None:
    """Check that the files exist which another program reads."""
    files = [word for word in words if re.fullmatch(r"[\w/-]+\.(yml|sh|txt)", word)]
    assert all((ROOT / file).is_file() for file in files), files


COMMANDS = {
    "mcore-mas": check_mcore_mas,
    "snakemake": check_snakemake,
    "make": check_make,
    "python": check_python,
    "python3.12": check_python,
}
OTHERS = {"curl", "ray", "export", "conda", "bash", "squeue", "tail", "scancel", "run"}  # .ci/run
OTHERS |= {"cat", "cd", "rm", "sinfo", "job=$(squeue"}


@pytest.mark.parametrize("line", LINES)
def test_a_command_is_one_that_its_program_takes(line: str) -> None:
    for command in re.split(r" && ", line):
        words = shlex.split(command, comments=True)
        name = words[0].rpartition("/")[2]
        assert name in COMMANDS or name in OTHERS, name
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
def test_a_command_that_no_program_takes_is_seen(line: str) -> None:
    with pytest.raises((KeyError, AssertionError, TyperException)):
        test_a_command_is_one_that_its_program_takes(line)


# Configs are composed, with overrides for the settings that a block leaves out.

BARE = ["+data={generator: arithmetic, train: 9, validation: 2, test: 2}", "+evaluation={}"]
BARE += ["+trainer={steps: 1, tasks_per_step: 2, group_size: 2}"]
MODEL = "policy_defaults={model: models/m, lr: 1e-6}"
GIVEN = {  # overrides that a block needs besides its own settings
    "configuration-5": BARE,
    "configuration-6": ["cold_start=null"],
    "configuration-7": ["cold_start=null", "data.generator=null"],
    "credit-4": ["experiment=demo_search"],
    "credit-5": [
        "~experiment",
        *BARE,
        MODEL,
        "team=m_ask",
        "sharing=separate",
        "+retriever={}",
    ],
    "engines-0": ["cluster.device=auto"],
    "engines-3": ["~experiment", *BARE, "team=solver_verifier"],
    "gateway-0": ["~experiment", *BARE, MODEL, "sharing=shared", "+run=x"],
    "lora-2": ["policies.solver.tp=1"],
    "lora-3": ["policies.solver.tp=1"],
    "cluster-15": ["engine=sglang", "engine.python=python"],
}


def test_overrides_are_of_blocks_that_exist() -> None:
    assert set(GIVEN) <= {block.name for block in BLOCKS if block.language == "yaml"}


def composed(values: dict[str, Any], *given: str) -> None:
    """Compose the sections of a block into the experiment demo_math, or into that of `given`."""
    chosen = [
        f"{group.removeprefix('override /')}={name}"
        for one in values.pop("defaults", ())
        for group, name in one.items()
    ]
    first = [] if any("experiment" in item for item in given) else ["experiment=demo_math"]
    resolve([*first, *chosen, *given], sections={"run": "block", **values})


@pytest.mark.parametrize(("name", "body"), blocks("yaml"))
def test_a_config_composes(
    name: str, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = re.search(r"^# configs/(\w+)/(\w+)\.yaml", body, re.MULTILINE)
    if body.startswith("suite:"):
        Suite.load(yaml.safe_load(body), tmp_path)
    elif place:
        file = tmp_path / "configs" / place[1] / f"{place[2]}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(body)
        names = (
            [place[2]]
            if "grid:" not in body
            else ["ours_small_shared", "ours_large_separate", "ours_rloo"]
        )
        for row in names:
            resolve([*GIVEN[name], f"{place[1]}={row}"], tmp_path / "configs")
    elif body.startswith("- {"):  # edges of a graph that ships
        shipped = "".join(file.read_text() for file in (CONFIGS / "team").glob("*.yaml"))
        assert all(line in shipped for line in body.splitlines()), body
    else:
        wholes = (
            body.splitlines() if body.count("\nengine:") else [body]
        )  # each line another engine
        for whole in wholes:
            composed(
                yaml.safe_load(whole.replace("my_pkg.engines:Mine", OWN_ENGINE)),
                *GIVEN.get(name, []),
            )


@pytest.mark.parametrize(("name", "body"), blocks("toml"))
def test_entry_points_name_a_group_that_is_looked_up(name: str, body: str) -> None:
    (group,) = tomllib.loads(body)["project"]["entry-points"]
    assert group.removeprefix("mcore_mas.") in (ROOT / "rollout/base/lookup.py").read_text()


# Python is run, with the names that the block expects.


PRINTS = {"sandbox-0": "{'data/train.csv': 8}\n", "coaches-1": "", "gateway-2": ""}


@pytest.mark.parametrize("name", PRINTS)
def test_python_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "nobody-is-asked")
    (body,) = [b.values[1] for b in blocks("python") if b.values[0] == name]
    there: dict[str, Any] = dict.fromkeys(("Task", "TeamSession", "Env"), object)
    there |= {
        "config": RunConfig.from_values(resolve(["experiment=demo_math", "coach=openai"]), "here"),
        "folder": tmp_path,
    }
    script = tmp_path / "block.py"
    script.write_text(f"async def block(groups=()):\n{textwrap.indent(body, '    ')}")
    asyncio.run(runpy.run_path(str(script), there)["block"]())
    assert capsys.readouterr().out.endswith(PRINTS[name])


def test_code_for_users_has_public_names_alone() -> None:
    scaffold = (ROOT / "mcore_mas/pipeline/scaffold").rglob("*.txt")
    notebooks = (ROOT / "docs/notebooks").glob("*.ipynb")
    texts = {file.name: file.read_text() for file in (*scaffold, *notebooks)}
    texts |= {block.name: block.body for block in BLOCKS if block.language == "python"}
    assert {"team.py.txt", "quickstart-1", "first_team.ipynb"} <= set(texts) and "own_team" in str(
        set(texts)
    )
    deep = {
        name: re.findall(r"\b(?:from|import) mcore_mas\.[\w.]+", text)
        for name, text in texts.items()
    }
    assert {name: found for name, found in deep.items() if found} == {}


def test_all_python_is_run() -> None:
    """tests/workflow/test_quickstart.py runs the README's block."""
    assert {b.values[0] for b in blocks("python")} == {*PRINTS, "README-1"}
