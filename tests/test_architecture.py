"""Architecture of the source trees: the order of imports, import cycles, dangerous calls, unique public names."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from mcore_mas.credit.advantage_files import advantage_path, write_advantages
from rollout.records.files import write_trajectories
from tests.support.played import trajectory, turn

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("retrieval", "rollout", "mcore_mas")
PROGRAMS = ("workflow", "benchmarks", "docs", "tests")  # these import the packages


def python_files(folders: Iterable[str]) -> list[Path]:
    files: list[Path] = []
    for folder in folders:
        files += (ROOT / folder).rglob("*.py")
    return sorted(files)


SOURCES = python_files(PACKAGES)
OTHERS = python_files(PROGRAMS)

# Each layer may import those before it. `docs/architecture.md` describes them.
LAYERS = (
    "retrieval",
    "rollout.base",
    "rollout.records",
    "rollout.models",
    "rollout.sync",
    "rollout.engines",
    "rollout.sandbox",
    "rollout.environments",
    "rollout.teams",
    "rollout.gateway",
    "rollout.orchestras",
    "rollout.tasks",
    "rollout.rewards",
    "rollout.config",
    "mcore_mas.equations",
    "mcore_mas.config",
    "mcore_mas.megatron",
    "mcore_mas.megatron.model",
    "mcore_mas.megatron.state",
    "mcore_mas.megatron.step",
    "mcore_mas.credit",
    "mcore_mas.packing",
    "mcore_mas.reports",
    "mcore_mas.planning",
    "mcore_mas.runtime",
    "mcore_mas.tracking",
    "mcore_mas.evaluation",
    "mcore_mas.training",
    "mcore_mas.pipeline",
    "mcore_mas.api",
    "mcore_mas.cli",
    "mcore_mas.__main__",
)
ROOTS = ("mcore_mas", "rollout")  # packages whose __init__ belongs to no layer

# Files that read or set environment variables, with the reason
ENVIRONMENT_READERS = {
    "rollout/base/urls.py": "HTTP clients read the hosts without proxy only from a variable",
    "rollout/base/failpoints.py": "a test's orders reach every process of a run",
    "mcore_mas/pipeline/suite_file.py": "the jobs of a suite import the Python code beside it",
    "mcore_mas/pipeline/base_model.py": "tokenizers reads its number of threads only from a variable",
    "mcore_mas/planning/machine.py": "the GPUs and threads of a process are given only by variables",
    "mcore_mas/tracking/mlflow_store.py": "MLflow's telemetry is switched off only by a variable",
    "mcore_mas/runtime/trainer_rank.py": "Gloo, NCCL and CUDA read their settings only from variables",
    "mcore_mas/runtime/cluster.py": "only a variable tells whether Ray requires a token",
    "mcore_mas/runtime/local_ray.py": "Ray and glibc read settings of processes only from variables",
    "mcore_mas/runtime/slurm.py": "Slurm gives a job's number and its nodes in variables",
    "mcore_mas/runtime/slurm_ray.py": "Ray reads its authentication only from a variable",
    "rollout/sandbox/guest/warden.py": "a program's home and temporary folder are in its sandbox",
    "mcore_mas/cli/mlflow_pages.py": "MLflow's server passes settings to its workers in variables",
    "mcore_mas/cli/doctor.py": "a shipped config reads the interpreter of SGLang from a variable",
    "rollout/engines/sglang/toolkit.py": "SGLang finds its compilers by PATH and CUDA_HOME",
    "mcore_mas/pipeline/config_cache.py": "an image names its SGLang in a variable, which a shipped config reads",
    "rollout/engines/sglang/server.py": "a server of another environment must not inherit PYTHONPATH",
    "rollout/orchestras/program.py": "a user's agent program gets this process's variables and its own",
    "rollout/environments/verifiers_worker.py": "`verifiers` takes API keys and finds uv by variables",
    "rollout/engines/remote/keys.py": "an API key may be in a variable, which is removed for children",
}

FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "imp"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
}
# Files without any of these words, which are most, are not parsed.
DANGEROUS_WORDS = re.compile(
    rf"\b(?:{'|'.join([*FORBIDDEN_MODULES, *FORBIDDEN_CALLS, 'trust_remote_code', 'shell', 'torch.load'])})\b"
)
# Files that run programs of models, in a process that is confined before it reads the program
MODEL_PROGRAM_RUNNERS = {
    "rollout/sandbox/guest/program.py",
    "rollout/sandbox/guest/caller.py",
}
# Stands for SGLang, and reads only tensors of its parent process
UNPICKLERS = {"benchmarks/gpu/hand_over.py"}

HEAVY_LIBRARIES = (
    "torch",
    "ray",
    "transformers",
    "sglang",
    "megatron",
    "faiss",
    "pandas",
    "mlflow",
)
LIGHT_MODULES = (
    "rollout.records.trajectory",
    "rollout.teams.team",
    "rollout.orchestras",
    "rollout.environments",
    "rollout.rewards",
    "rollout.sandbox",
    "mcore_mas.pipeline.project",  # of `mcore-mas new`
    "mcore_mas.pipeline.check",
    "mcore_mas.pipeline.prepare",
    "mcore_mas.reports.run_states",  # of `mcore-mas ls` and `compare`
)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


@pytest.fixture(scope="module", autouse=True)
def _clear_syntax_trees() -> Iterator[None]:
    """Drop all syntax trees after the last test here; every garbage collection would visit them."""
    yield
    for function in (tree, nodes, imports):
        function.cache_clear()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports anywhere; `from a import b` gives both a and a.b."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = module_name(path).split(".")
            depth = len(parents) - node.level + (path.name == "__init__.py")
            package = parents[:depth] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(name: str) -> str | None:
    """Return the innermost layer that contains a module; None for the roots and for other packages."""
    return max((layer for layer in LAYERS if within(name, layer)), key=len, default=None)


def test_every_module_is_in_a_layer() -> None:
    names = map(module_name, SOURCES)
    assert not [name for name in names if layer_of(name) is None and name not in ROOTS]


def within_any(name: str, packages: Iterable[str]) -> bool:
    return any(within(name, package) for package in packages)


def imports_of(package: str) -> Iterator[tuple[Path, str]]:
    """Yield each file of a package with each name that it imports."""
    for path in SOURCES:
        if within(module_name(path), package):
            for name in imports(path):
                yield path, name


def test_layers_import_only_earlier_layers() -> None:
    offenders = []
    for path in SOURCES:
        layer = layer_of(module_name(path))
        for name in imports(path):
            imported_layer = layer_of(name)
            if imported_layer is None:
                continue
            if layer is None:
                offenders.append(f"{relative(path)} is a root, and imports {name}")
            elif LAYERS.index(imported_layer) > LAYERS.index(layer):
                offenders.append(f"{relative(path)} is below {imported_layer}, and imports {name}")
    assert not offenders


def test_retrieval_imports_no_other_package_of_the_project() -> None:
    offenders = [
        f"{relative(path)}: {name}"
        for path, name in imports_of("retrieval")
        if within_any(name, ("rollout", "mcore_mas"))
    ]
    assert not offenders


def test_rollout_imports_only_the_light_modules_of_retrieval() -> None:
    """These modules load without torch and FAISS."""
    light_modules = ("retrieval.client", "retrieval.regular_files")
    offenders = [
        f"{relative(path)}: {name}"
        for path, name in imports_of("rollout")
        if name.startswith("retrieval.") and not within_any(name, light_modules)
    ]
    assert not offenders


def test_only_megatron_imports_megatron_and_no_package_imports_programs() -> None:
    snakemake_users = (
        "mcore_mas.cli.suite_command",
        "mcore_mas.reports.studio_server",  # serves the library for charts that Snakemake ships
        "mcore_mas.runtime.snakemake_patches",
    )
    offenders = []
    for path in SOURCES:
        module = module_name(path)
        for name in imports(path):
            if within_any(name, PROGRAMS):
                offenders.append(f"{relative(path)}: {name}")
            if within(name, "megatron") and not within(module, "mcore_mas.megatron"):
                offenders.append(f"{relative(path)}: {name}")
            if within(name, "snakemake") and module not in snakemake_users:
                offenders.append(f"{relative(path)}: {name}")
    assert not offenders


def test_equations_import_tensors_and_the_types_of_options() -> None:
    libraries = {*sys.stdlib_module_names, "numpy", "pydantic", "torch"}
    layers = ("mcore_mas.equations", "rollout.base")
    offenders = [
        f"{relative(path)}: {name}"
        for path, name in imports_of("mcore_mas.equations")
        if name != "rollout"
        and name.split(".")[0] not in libraries
        and not within_any(name, layers)
    ]
    assert not offenders


def test_no_import_cycles() -> None:
    modules = {module_name(path): path for path in SOURCES}
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = imports(path)
        imported_modules = {imported_name for imported_name in imported if imported_name in modules}
        edges[name] = imported_modules - {name}
        # The __init__ of a package runs before its modules. It is an edge of a module inside the package
        # only if the module imports a name of it that is no module.
        sources_of_names = {
            imported_name.rpartition(".")[0]
            for imported_name in imported
            if imported_name not in modules
        }
        parents = {parent for parent in edges[name] if within(name, parent)}
        edges[name] -= parents - sources_of_names
    visited: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        cycle = (*trail[trail.index(name) :], name) if name in trail else ()
        assert not cycle, f"import cycle: {' -> '.join(cycle)}"
        if name not in visited:
            for imported_module in sorted(edges[name]):
                visit(imported_module, (*trail, name))
            visited.add(name)

    for name in modules:
        visit(name, ())


def public_names(path: Path) -> Iterator[str]:
    """Yield the public functions, classes and variables that a file defines at its top level."""
    for node in tree(path).body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
        yield from (name for name in names if not name.startswith("_"))


def test_a_public_name_is_defined_once() -> None:
    files_by_name: dict[str, set[str]] = {}
    for path in SOURCES:
        for name in public_names(path):
            files_by_name.setdefault(name, set()).add(relative(path))
    for name in ("main", "logger"):
        files_by_name.pop(name, None)
    assert not {name: files for name, files in files_by_name.items() if len(files) > 1}


def dotted_name(node: ast.AST) -> str:
    """Return a name or an attribute as it is written, such as `os.environ`; "" for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def reads_environment(path: Path) -> bool:
    accesses = ("os.environ", "os.getenv", "os.putenv")
    for node in nodes(path):
        if dotted_name(node) in accesses:
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
            if names & {"environ", "getenv"}:
                return True
    return False


def test_environment_variables_are_read_only_in_the_listed_files() -> None:
    readers = {relative(path) for path in SOURCES if reads_environment(path)}
    assert readers == set(ENVIRONMENT_READERS)


def dangerous_calls(path: Path) -> Iterator[str]:
    if not DANGEROUS_WORDS.search(path.read_text(encoding="utf-8")):
        return
    forbidden_modules = FORBIDDEN_MODULES - ({"pickle"} if relative(path) in UNPICKLERS else set())
    yield from (name for name in imports(path) if name.split(".")[0] in forbidden_modules)
    for node in nodes(path):
        if not isinstance(node, ast.Call):
            continue
        called = dotted_name(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        confined = called in ("eval", "exec") and relative(path) in MODEL_PROGRAM_RUNNERS
        if called in FORBIDDEN_CALLS and not confined:
            yield f"{called} in line {node.lineno}"
        if "trust_remote_code" in keywords:
            yield f"trust_remote_code in line {node.lineno}"
        shell = keywords.get("shell")
        if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
            yield f"shell= in line {node.lineno}"
        weights_only = keywords.get("weights_only")
        is_safe = isinstance(weights_only, ast.Constant) and weights_only.value is True
        if called == "torch.load" and not is_safe:
            yield f"torch.load without weights_only=True in line {node.lineno}"


@pytest.mark.slow
def test_nothing_dangerous_is_called() -> None:
    calls_by_file = {relative(path): list(dangerous_calls(path)) for path in [*SOURCES, *OTHERS]}
    assert not {path: calls for path, calls in calls_by_file.items() if calls}


def test_listeners_stay_on_loopback() -> None:
    offenders = []
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
                offenders.append(f"{relative(path)}:{node.lineno}")
    assert not offenders


def test_no_module_has_a_name_without_a_subject() -> None:
    names = ("utils", "util", "helpers", "misc", "common")
    assert not [relative(path) for path in SOURCES if path.stem in names]


def test_every_module_has_a_docstring() -> None:
    assert not [relative(path) for path in [*SOURCES, *OTHERS] if not ast.get_docstring(tree(path))]


def test_fast_commands_load_without_the_heavy_libraries() -> None:
    """Every job reads the workflow's files when it starts."""
    workflow = [ROOT / "workflow/Snakefile", *(ROOT / "workflow/rules").glob("*.smk")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in workflow)
    workflow_imports = re.findall(
        r"^from (?:mcore_mas|rollout)[\w.]* import [\w, ]+", text, re.MULTILINE
    )
    assert "from mcore_mas.pipeline import paper_suite" in workflow_imports
    lines = [f"import {', '.join(LIGHT_MODULES)}", *workflow_imports]
    assert not set(HEAVY_LIBRARIES) & modules_after(*lines)


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], set()),
        (["ls", "."], set()),
        (["show", "{file}"], set()),
        (["show", "{file}", "--index", "1"], set()),
        (["explain", "{file}", "--advantage", "drmas"], {"torch"}),
    ],
    ids=lambda value: " ".join(value),
)
def test_commands_load_what_they_need(
    arguments: list[str], heavy: set[str], tmp_path: Path
) -> None:
    file = tmp_path / "train/trajectories/step_000000.parquet"
    write_trajectories(file, [trajectory(turn(0, reward=1.0))])
    write_advantages(advantage_path(file), {("0/t/0", "", 0): 0.5})
    command = ["mcore-mas", *(argument.format(file=file) for argument in arguments)]
    modules = modules_after(
        "import contextlib, sys",
        f"sys.argv = {command}",
        "from mcore_mas.cli.main import main",
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr): main()",
    )
    assert set(HEAVY_LIBRARIES) & modules == heavy
    assert "mcore_mas.cli.trajectories" in modules
    # The models of a config, with the environments, take longer than the rest of the command line.
    assert not {"mcore_mas.config.run", "rollout.environments", "omegaconf"} & modules


@pytest.fixture(scope="module")
def modules_of_a_run() -> tuple[set[str], set[str]]:
    """Return the modules of the controller, and those of all processes of a run on a GPU."""
    code = """
import sys
import mcore_mas.training.train, mcore_mas.evaluation.evaluate
print(*sys.modules)
import benchmarks.gpu.whole_run, benchmarks.gpu.whole_run_sections
import mcore_mas.runtime.trainer_rank, rollout.engines.embedded.host
print(*sys.modules)
"""
    controller, all_processes = output_of(code).splitlines()
    return set(controller.split()), set(all_processes.split())


@pytest.mark.slow
def test_the_controller_loads_torch_and_not_megatron(
    modules_of_a_run: tuple[set[str], set[str]],
) -> None:
    controller, _ = modules_of_a_run
    assert set(HEAVY_LIBRARIES) & controller == {"ray", "torch"}


@pytest.mark.slow
def test_a_whole_run_on_a_gpu_loads_only_packages_of_its_kit_and_the_image(
    modules_of_a_run: tuple[set[str], set[str]],
) -> None:
    """An import of another package would end every section of `benchmarks.gpu.whole_run` there."""
    absent = {"bm25s", "faiss", "httpx2", "hydra", "llguidance", "mlflow", "omegaconf"}
    absent |= {"snakemake", "starlette", "uvicorn"}
    _, all_processes = modules_of_a_run
    assert not absent & all_processes


@pytest.mark.slow
def test_megatron_is_patched_before_it_is_imported() -> None:
    """Unpatched Megatron imports torch's compiler, which takes as long as the import of Megatron itself."""
    if torch.cuda.is_available():
        return
    for package in ("model", "state", "step"):
        first_file = ROOT / "mcore_mas" / "megatron" / package / "__init__.py"
        assert "mcore_mas.megatron.patches" in imports(first_file)
    # torch is imported once; each module is the first one that a fork imports.
    code = """
import importlib, os, sys
import torch
for name in ("spec", "step.trainer"):
    if os.fork() == 0:
        module = importlib.import_module("mcore_mas.megatron." + name)
        if name == "spec":
            module.init_process_groups(rank=0, threads=1)
        print(name, "megatron.core" in sys.modules, "torch._dynamo" in sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""
    assert output_of(code).splitlines() == [
        "spec True False",
        "step.trainer True False",
    ]


def modules_after(*lines: str) -> set[str]:
    """Return the modules that a new process has imported after these lines of code."""
    code = "\n".join([*lines, "import sys; print(*sys.modules)"])
    return set(output_of(code).split())


def output_of(code: str) -> str:
    """Return what a new process prints that runs this code."""
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return completed.stdout


def test_test_modules_have_unique_names() -> None:
    """pytest imports a test module by its file name alone if its folder is not a package."""
    names = Counter(
        path.name
        for path in OTHERS
        if path.name.startswith("test_") and not (path.parent / "__init__.py").exists()
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_each_rule_has_a_script_of_its_name() -> None:
    rule = re.compile(r"^rule (\w+):\n((?:\n|    .*\n)*)", re.MULTILINE)
    rules = set()
    for path in (ROOT / "workflow" / "rules").glob("*.smk"):
        for name, body in rule.findall(path.read_text(encoding="utf-8")):
            if "    shell:" not in body:
                rules.add(name)
    assert {path.stem for path in (ROOT / "workflow/scripts").glob("*.py")} == rules
