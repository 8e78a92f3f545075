"""The house's rules, read from the source trees: who imports whom, and what nobody may call."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from mcore_mas.megatron.cpu import TRIED

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("retrieval", "rollout", "mcore_mas")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PROGRAMS = ("workflow", "benchmarks", "docs", "tests")  # beside the packages, which import none of them
OTHERS = sorted(path for folder in PROGRAMS for path in (ROOT / folder).rglob("*.py"))

# Folders in the order of their imports: each may import those before it. `docs/architecture.md` says what is in each.
ROOMS = (
    "mcore_mas.rollout.base",
    "mcore_mas.retrieval",
    "mcore_mas.rollout.records",
    "mcore_mas.rollout.models",
    "mcore_mas.rollout.sync",
    "mcore_mas.rollout.engines",
    "mcore_mas.rollout.sandbox",
    "mcore_mas.rollout.environments",
    "mcore_mas.rollout.teams",
    "mcore_mas.rollout.gateway",
    "mcore_mas.rollout.orchestras",
    "mcore_mas.rollout.tasks",
    "mcore_mas.rollout.rewards",
    "mcore_mas.rollout.config",
    "mcore_mas.equations",
    "mcore_mas.config",
    "mcore_mas.megatron",
    "mcore_mas.credit",
    "mcore_mas.packing",
    "mcore_mas.reports",
    "mcore_mas.planning",
    "mcore_mas.training",
    "mcore_mas.pipeline",
    "mcore_mas.api",
    "mcore_mas.cli",
    "mcore_mas.__main__",
)
MEGATRON = ("model", "state", "step")  # the folders of mcore_mas.megatron, in the same order

ENVIRONMENT_READERS = {
    "rollout/base/http.py": "clients of others have the hosts that no proxy is asked for from nowhere else",
    "rollout/base/failpoints.py": "what a test orders reaches every process of a run in no other way",
    "mcore_mas/pipeline/suite_file.py": "the jobs of a suite import the Python code beside it",
    "mcore_mas/pipeline/base_model.py": "tokenizers takes its number of threads from nowhere else",
    "mcore_mas/planning/machine.py": "CUDA takes what GPUs a process may see from nowhere else",
    "mcore_mas/training/tracking_store.py": "MLflow's telemetry has no other switch",
    "mcore_mas/training/trainer_group.py": "gloo and NCCL take their settings from nowhere else",
    "mcore_mas/training/cluster.py": "RAY_ADDRESS, whose cluster Ray would join",
    "mcore_mas/training/slurm.py": "Slurm's number of a job and its machines",
    "rollout/sandbox/guest/warden.py": "a program's home and temporary folder are its own box",
    "mcore_mas/cli/machine.py": "MLflow's server passes its settings to its workers in the environment",
    "rollout/engines/sglang/server.py": "a server of another environment does not inherit where this one's modules are",
    "rollout/orchestras/program.py": "an agent program of the user's gets this process's variables and its own",
    "rollout/engines/remote/__init__.py": "an API key may be given in a variable, which is removed for children",
}

# import name -> distribution, of libraries that are in an extra and imported only where they are used
OPTIONAL_LIBRARIES = {
    "anthropic": "anthropic",
    "google": "google-genai",
    "gymnasium": "gymnasium",
    "mcp": "mcp",
    "trackio": "trackio",
    "wandb": "wandb",
}
# of worlds that cannot be had from a registry in a version that fits (their own pages say how to install them), and
# what torch for CUDA brings
INSTALLED_APART = {"alfworld", "transformer_engine", "triton", "web_agent_site"}

FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "imp"}
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
MODEL_TEXT_RUNNERS = {  # inside the sandbox's wall, in a process confined before it reads the text
    "rollout/sandbox/guest/program.py",
    "rollout/sandbox/guest/caller.py",
}
UNPICKLERS = {"benchmarks/gpu/hand_over.py"}  # stands for SGLang before its own parent, and opens tensors alone
HEAVY = ("torch", "ray", "transformers", "sglang", "megatron", "faiss", "pandas", "mlflow")
LIGHT_MODULES = (
    "mcore_mas.rollout.records.trajectory",
    "mcore_mas.rollout.teams.team",
    "mcore_mas.rollout.orchestras",
    "mcore_mas.rollout.environments",
    "mcore_mas.rollout.rewards",
    "mcore_mas.rollout.sandbox",
    "mcore_mas.pipeline.base_model",  # of `mcore-mas new`
    "mcore_mas.pipeline.check",
    "mcore_mas.pipeline.prepare",
    "mcore_mas.reports.runs",  # of `mcore-mas ls` and `compare`
)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    """All syntax trees are dropped after the last test here: while they are there, each collection visits them."""
    yield
    for known in (tree, nodes, imports):
        known.cache_clear()


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("rollout", "retrieval"):  # links in mcore_mas lead to them
        parts = ("mcore_mas", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it; `from a import b` counts as a and as a.b."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name_of(path).split(".")
            kept = len(package) - node.level + (path.name == "__init__.py")
            base = ".".join([*package[:kept], *([node.module] if node.module else [])]) if node.level else node.module
            found |= {str(base)} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def places(root: Path) -> str:
    return str(root.relative_to(ROOT))


def test_the_trees_are_there() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(PACKAGES)


def room_of(name: str) -> int | None:
    """The number of the folder in `ROOMS` that a module is in; None for the packages around them."""
    return next((number for number, room in enumerate(ROOMS) if within(name, room)), None)


@pytest.mark.parametrize("path", SOURCES, ids=places)
def test_folders_import_one_way(path: Path) -> None:
    own = name_of(path)
    if own in ("mcore_mas", "mcore_mas.rollout"):
        assert not [name for name in imports(path) if within(name, "mcore_mas")], f"{own} imports nothing of ours"
        return
    number = room_of(own)
    assert number is not None, f"{places(path)} is in no room; add its folder to ROOMS, in the order of imports"
    outside = [*PROGRAMS]
    if own != "mcore_mas.cli.main":  # `run` has Snakemake's parser read what it hands on
        outside.append("snakemake")
    if not within(own, "mcore_mas.megatron"):
        outside.append("megatron")
    for name in imports(path):
        assert not any(within(name, other) for other in outside), f"{places(path)} may not import {name}"
        if within(own, "mcore_mas.rollout") and within(name, "mcore_mas.retrieval"):  # it loads without torch and FAISS
            client = within(name, "mcore_mas.retrieval.client") or name == "mcore_mas.retrieval"
            assert client, f"{places(path)} may not import {name}"
        other = room_of(name)
        if within(name, "mcore_mas") and other is not None:
            assert other <= number, f"{places(path)}: {ROOMS[number]} is below {ROOMS[other]}, which it imports"


@pytest.mark.parametrize("path", sorted((ROOT / "mcore_mas" / "megatron").rglob("*.py")), ids=places)
def test_folders_of_megatron_import_one_way(path: Path) -> None:
    parts = path.relative_to(ROOT / "mcore_mas" / "megatron").parts
    own = MEGATRON.index(parts[0]) if parts[0] in MEGATRON else -1
    for name in imports(path):
        rest = name.split(".")[2:3] if within(name, "mcore_mas.megatron") else []
        other = MEGATRON.index(rest[0]) if rest and rest[0] in MEGATRON else -1
        assert other <= own, f"{places(path)} is below mcore_mas.megatron.{rest[0]}, which it imports"


@pytest.mark.parametrize("path", sorted((ROOT / "mcore_mas" / "equations").rglob("*.py")), ids=places)
def test_equations_import_tensors_and_the_types_of_options(path: Path) -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "pydantic", "torch"}
    ours = ("mcore_mas.equations", "mcore_mas.rollout.base")
    bad = {n for n in imports(path) if n.split(".")[0] not in allowed and not any(within(n, room) for room in ours)}
    assert not bad - {"mcore_mas", "mcore_mas.rollout"}


def test_no_import_cycles() -> None:
    modules = {name_of(path): path for path in SOURCES}
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = imports(path)
        edges[name] = {other for other in found if other in modules} - {name}
        # a package's own __init__ runs before everything in it: only who takes a name from it, and no module, needs it
        taken = {other.rpartition(".")[0] for other in found if other not in modules}
        edges[name] -= {parent for parent in edges[name] if within(name, parent) and parent not in taken}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail[trail.index(name) :], name))}"
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in modules:
        visit(name, ())


@pytest.mark.parametrize("path", SOURCES, ids=places)
def test_functions_and_classes_fit_on_a_screen(path: Path) -> None:
    found = []
    for node in nodes(path):
        lines = (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 0) + 1
        if isinstance(node, ast.ClassDef) and lines > 200:
            found.append(f"class {node.name} has {lines} lines")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            if lines > 60:
                found.append(f"{node.name} has {lines} lines")
            if count > 8:
                found.append(f"{node.name} has {count} parameters")
    assert not found, f"{places(path)}: {'; '.join(found)}"


def test_a_public_name_is_defined_once() -> None:
    defined: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in tree(path).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [getattr(node, "name", None), *(t.id for t in targets if isinstance(t, ast.Name))]
            for name in {name for name in names if isinstance(name, str) and not name.startswith("_")}:
                defined.setdefault(name, set()).add(places(path))
    del defined["main"]  # of every program
    assert not {name: paths for name, paths in defined.items() if len(paths) > 1}


def reads_environment(path: Path) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv"))
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {"environ", "getenv"} & {a.name for a in node.names}
        )
        for node in nodes(path)
    )


def test_the_environment_is_read_where_a_vendor_demands_it() -> None:
    assert {places(path) for path in SOURCES if reads_environment(path)} == set(ENVIRONMENT_READERS)


@pytest.mark.parametrize("path", [*SOURCES, *OTHERS], ids=places)
def test_nothing_dangerous_is_called(path: Path) -> None:
    forbidden = FORBIDDEN_MODULES - ({"pickle"} if places(path) in UNPICKLERS else set())
    bad = [name for name in imports(path) if name.split(".")[0] in forbidden]
    for node in nodes(path):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        confined = called in ("eval", "exec") and places(path) in MODEL_TEXT_RUNNERS
        if (called in FORBIDDEN_CALLS and not confined) or "trust_remote_code" in keywords:
            bad.append(f"{called} in line {node.lineno}")
        shell = keywords.get("shell")
        if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
            bad.append(f"shell= in line {node.lineno}")
        if called == "torch.load" and ast.unparse(keywords.get("weights_only", ast.Constant(False))) != "True":
            bad.append(f"torch.load without weights_only=True in line {node.lineno}")
    assert not bad, f"{places(path)}: {bad}"


def test_listeners_stay_on_loopback() -> None:
    wide = [
        f"{places(path)}:{node.lineno}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::")
    ]
    assert not wide


def test_no_drawer_for_odds_and_ends() -> None:
    assert not [places(path) for path in SOURCES if path.stem in ("utils", "util", "helpers", "misc", "common")]


@pytest.mark.parametrize("path", [*SOURCES, *OTHERS], ids=places)
def test_a_module_opens_with_a_sentence(path: Path) -> None:
    assert (ast.get_docstring(tree(path)) or "").strip(), f"{places(path)} has no docstring"


def test_what_answers_at_once_loads_without_the_heavy_libraries() -> None:
    workflow = [ROOT / "workflow/Snakefile", *(ROOT / "workflow/rules").glob("*.smk")]  # read by every job as it starts
    text = "\n".join(path.read_text(encoding="utf-8") for path in workflow)
    named = re.findall(r"^from ((?:mcore_mas|rollout)[\w.]*) import ([\w, ]+)", text, re.MULTILINE)
    assert ("mcore_mas.pipeline", "paper_suite") in named
    lines = [f"import {', '.join(LIGHT_MODULES)}", *(f"from {module} import {names}" for module, names in named)]
    assert not set(HEAVY) & loaded(*lines)


def test_the_controller_loads_torch_and_not_megatron() -> None:
    assert set(HEAVY) & loaded("import mcore_mas.training.train, mcore_mas.training.evaluate") == {"ray", "torch"}


def test_megatron_is_patched_before_it_is_imported() -> None:
    """Unpatched it asks torch for its compiler, which takes as long to import as all of Megatron."""
    begin = "from mcore_mas.megatron.spec import init_process_groups as begin; begin(rank=0, threads=1)"
    folders = [f"import mcore_mas.megatron.{folder}" for folder in ("model.build", "state.sharded", "step.trainer")]
    for line in (begin, *folders) if not torch.cuda.is_available() else ():
        modules = loaded(line)
        assert "megatron.core" in modules and "torch._dynamo" not in modules, line


def loaded(*lines: str) -> set[str]:
    """The modules that a process has after these lines."""
    command = [sys.executable, "-c", "\n".join([*lines, "import sys; print(*sys.modules)"])]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        entry for name in ("coach", "gymnasium", "mcp", "trackers") for entry in project["optional-dependencies"][name]
    ]
    declared = {re.split(r"[=<>\[]", entry)[0].lower() for entry in [*project["dependencies"], *extras]}
    distributions = importlib.metadata.packages_distributions()
    missing = {}
    for path in SOURCES:
        for top in (
            {name.split(".")[0] for name in imports(path)}
            - set(sys.stdlib_module_names)
            - set(PACKAGES)
            - INSTALLED_APART
        ):
            found = {distribution.lower() for distribution in distributions.get(top, [])}
            if not declared & (found | {OPTIONAL_LIBRARIES.get(top)}):
                missing[top] = places(path)
    assert not missing


def locked(name: str) -> dict[str, str]:
    """The versions that a lock pins."""
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return {
        canonicalize_name(name): version for name, sign, version in (line.partition("==") for line in lines) if sign
    }


def test_the_locks_of_two_pythons_differ_in_megatron_core_alone() -> None:
    older, newer = locked("lock.txt"), locked("lock-3.12.txt")
    differs = {name for name in older.keys() | newer.keys() if older.get(name) != newer.get(name)}
    assert differs == {"megatron-core"}
    assert {older["megatron-core"], newer["megatron-core"]} <= {*TRIED}
    assert Version(newer["megatron-core"]) == max(map(Version, TRIED))


def test_direct_dependencies_are_ranges_that_hold_what_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [Requirement(r) for r in [*project["dependencies"], *project["optional-dependencies"]["dev"]]]
    for name in ("lock.txt", "lock-3.12.txt"):
        pinned = locked(name)
        assert not [str(r) for r in declared if not r.specifier.contains(pinned[canonicalize_name(r.name)])], name
    assert not [str(r) for r in declared if "==" in str(r.specifier) or "<" not in str(r.specifier)]


def test_modules_of_tests_have_names_of_their_own() -> None:
    """pytest imports a test by its file's name alone where no package is around it."""
    alone = [path for path in OTHERS if path.name.startswith("test_") and not (path.parent / "__init__.py").exists()]
    assert [name for name, times in Counter(path.name for path in alone).items() if times > 1] == []


def test_each_rule_has_a_short_script_of_its_name() -> None:
    rules = {
        name
        for path in (ROOT / "workflow" / "rules").glob("*.smk")
        for name, body in re.findall(
            r"^rule (\w+):\n((?:\n|    .*\n)*)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        if "    shell:" not in body  # a command of one line
    }
    scripts = {
        path.stem: path.read_text(encoding="utf-8").splitlines()
        for path in (ROOT / "workflow/scripts").iterdir()
        if path.suffix == ".py"
    }
    assert set(scripts) == rules
    assert not [name for name, lines in scripts.items() if len(lines) > 40]
