"""Architecture of the source trees: order of imports, import cycles, dangerous calls, one name for one thing."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("retrieval", "rollout", "mcore_mas")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PROGRAMS = (
    "workflow",
    "benchmarks",
    "docs",
    "tests",
)  # import the packages; no package imports them
OTHERS = sorted(path for folder in PROGRAMS for path in (ROOT / folder).rglob("*.py"))

# Folders in the order of their imports: each may import those before it. `docs/architecture.md` describes them.
ROOMS = (
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
ROOTS = ("mcore_mas", "rollout")  # packages whose __init__ belongs to no room

ENVIRONMENT_READERS = {
    "rollout/base/urls.py": "clients of others have the hosts that no proxy is asked for from nowhere else",
    "rollout/base/failpoints.py": "what a test orders reaches every process of a run in no other way",
    "mcore_mas/pipeline/suite_file.py": "the jobs of a suite import the Python code beside it",
    "mcore_mas/pipeline/base_model.py": "tokenizers takes its number of threads from nowhere else",
    "mcore_mas/planning/machine.py": "what GPUs and threads a process may use is said nowhere else",
    "mcore_mas/tracking/mlflow_store.py": "MLflow's telemetry has no other switch",
    "mcore_mas/runtime/trainer_rank.py": "gloo and NCCL take their settings from nowhere else",
    "mcore_mas/runtime/cluster.py": "Ray says nowhere else whether it asks for a token",
    "mcore_mas/runtime/local_ray.py": "Ray and glibc take settings of processes from nowhere else",
    "mcore_mas/runtime/slurm.py": "Slurm's number of a job and its machines",
    "mcore_mas/runtime/slurm_ray.py": "Ray takes its authentication from nowhere else",
    "rollout/sandbox/guest/warden.py": "a program's home and temporary folder are its own box",
    "mcore_mas/cli/machine.py": "MLflow's server passes its settings to its workers in the environment",
    "rollout/engines/sglang/server.py": "a server of another environment does not inherit where this one's modules are",
    "rollout/orchestras/program.py": "an agent program of the user's gets this process's variables and its own",
    "rollout/engines/remote/keys.py": "an API key may be given in a variable, which is removed for children",
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
MODEL_TEXT_RUNNERS = {  # run model-written programs, in a process that is confined before it reads the text
    "rollout/sandbox/guest/program.py",
    "rollout/sandbox/guest/caller.py",
}
UNPICKLERS = {
    "benchmarks/gpu/hand_over.py"
}  # plays SGLang's part for its own parent, and reads tensors only
HEAVY = ("torch", "ray", "transformers", "sglang", "megatron", "faiss", "pandas", "mlflow")
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
    for cached in (tree, nodes, imports):
        cached.cache_clear()


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


def room_of(name: str) -> str | None:
    """Return the innermost room that a module is in; None for the roots and for other packages."""
    return max((room for room in ROOMS if within(name, room)), key=len, default=None)


def test_every_module_is_in_a_room() -> None:
    names = map(module_name, SOURCES)
    assert not [name for name in names if room_of(name) is None and name not in ROOTS]


def test_rooms_import_one_way() -> None:
    offenders = []
    for path in SOURCES:
        room = room_of(module_name(path))
        for name in imports(path):
            other = room_of(name)
            if room is None and other is not None:
                offenders.append(f"{relative(path)} is a root, and imports {name}")
            if room and other and ROOMS.index(other) > ROOMS.index(room):
                offenders.append(f"{relative(path)} is below {other}, and imports {name}")
    assert not offenders


def test_retrieval_imports_nothing_of_ours() -> None:
    files = [path for path in SOURCES if relative(path).startswith("retrieval/")]
    ours = ("rollout", "mcore_mas")
    offenders = {
        f"{relative(path)}: {name}"
        for path in files
        for name in imports(path)
        if any(within(name, package) for package in ours)
    }
    assert not offenders


def test_rollout_imports_of_retrieval_only_its_client_and_its_reader_of_files() -> None:
    """Both load without torch and FAISS."""
    allowed = ("retrieval.client", "retrieval.regular_files")
    offenders = [
        f"{relative(path)}: {name}"
        for path in SOURCES
        if within(module_name(path), "rollout")
        for name in imports(path)
        if within(name, "retrieval")
        and name != "retrieval"
        and not any(within(name, module) for module in allowed)
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
            if any(within(name, program) for program in PROGRAMS):
                offenders.append(f"{relative(path)}: {name}")
            if within(name, "megatron") and not within(module, "mcore_mas.megatron"):
                offenders.append(f"{relative(path)}: {name}")
            if within(name, "snakemake") and module not in snakemake_users:
                offenders.append(f"{relative(path)}: {name}")
    assert not offenders


def test_equations_import_tensors_and_the_types_of_options() -> None:
    libraries = {*sys.stdlib_module_names, "numpy", "pydantic", "torch"}
    rooms = ("mcore_mas.equations", "rollout.base")
    offenders = [
        f"{relative(path)}: {name}"
        for path in SOURCES
        if within(module_name(path), "mcore_mas.equations")
        for name in imports(path) - {"rollout"}
        if name.split(".")[0] not in libraries and not any(within(name, room) for room in rooms)
    ]
    assert not offenders


def test_no_import_cycles() -> None:
    modules = {module_name(path): path for path in SOURCES}
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = imports(path)
        edges[name] = {other for other in imported if other in modules} - {name}
        # A package's __init__ runs before its modules. It is an edge only if a name is taken from it, not a module.
        taken_from = {other.rpartition(".")[0] for other in imported if other not in modules}
        edges[name] -= {
            parent for parent in edges[name] if within(name, parent) and parent not in taken_from
        }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, (
            f"import cycle: {' -> '.join((*trail[trail.index(name) :], name))}"
        )
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in modules:
        visit(name, ())


def test_a_public_name_is_defined_once() -> None:
    defined: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in tree(path).body:
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            names = [
                getattr(node, "name", None),
                *(t.id for t in targets if isinstance(t, ast.Name)),
            ]
            for name in {
                name for name in names if isinstance(name, str) and not name.startswith("_")
            }:
                defined.setdefault(name, set()).add(relative(path))
    defined.pop("main", None)  # of every program
    defined.pop("logger", None)
    assert not {name: paths for name, paths in defined.items() if len(paths) > 1}


def reads_environment(path: Path) -> bool:
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in (
            "os.environ",
            "os.getenv",
            "os.putenv",
        ):
            return True
        names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
        if names & {"environ", "getenv"} and node.module == "os":
            return True
    return False


def test_the_environment_is_read_where_a_vendor_demands_it() -> None:
    assert {relative(path) for path in SOURCES if reads_environment(path)} == set(
        ENVIRONMENT_READERS
    )


def dangerous_calls(path: Path) -> Iterator[str]:
    forbidden_modules = FORBIDDEN_MODULES - ({"pickle"} if relative(path) in UNPICKLERS else set())
    yield from (name for name in imports(path) if name.split(".")[0] in forbidden_modules)
    for node in nodes(path):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        confined = called in ("eval", "exec") and relative(path) in MODEL_TEXT_RUNNERS
        if called in FORBIDDEN_CALLS and not confined:
            yield f"{called} in line {node.lineno}"
        if "trust_remote_code" in keywords:
            yield f"trust_remote_code in line {node.lineno}"
        shell = keywords.get("shell")
        if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
            yield f"shell= in line {node.lineno}"
        weights_only = ast.unparse(keywords.get("weights_only", ast.Constant(False)))
        if called == "torch.load" and weights_only != "True":
            yield f"torch.load without weights_only=True in line {node.lineno}"


@pytest.mark.slow
def test_nothing_dangerous_is_called() -> None:
    calls = {relative(path): list(dangerous_calls(path)) for path in [*SOURCES, *OTHERS]}
    assert not {path: found for path, found in calls.items() if found}


def test_listeners_stay_on_loopback() -> None:
    wide = [
        f"{relative(path)}:{node.lineno}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::")
    ]
    assert not wide


def test_no_module_for_odds_and_ends() -> None:
    names = ("utils", "util", "helpers", "misc", "common")
    assert not [relative(path) for path in SOURCES if path.stem in names]


def test_every_module_has_a_docstring() -> None:
    assert not [relative(path) for path in [*SOURCES, *OTHERS] if not ast.get_docstring(tree(path))]


def test_fast_commands_load_without_the_heavy_libraries() -> None:
    workflow = [
        ROOT / "workflow/Snakefile",
        *(ROOT / "workflow/rules").glob("*.smk"),
    ]  # read at the start of every job
    text = "\n".join(path.read_text(encoding="utf-8") for path in workflow)
    named = re.findall(r"^from ((?:mcore_mas|rollout)[\w.]*) import ([\w, ]+)", text, re.MULTILINE)
    assert ("mcore_mas.pipeline", "paper_suite") in named
    lines = [
        f"import {', '.join(LIGHT_MODULES)}",
        *(f"from {module} import {names}" for module, names in named),
    ]
    assert not set(HEAVY) & loaded(*lines)


@pytest.mark.slow
def test_the_controller_loads_torch_and_not_megatron() -> None:
    line = "import mcore_mas.training.train, mcore_mas.evaluation.evaluate"
    assert set(HEAVY) & loaded(line) == {"ray", "torch"}


@pytest.mark.slow
def test_megatron_is_patched_before_it_is_imported() -> None:
    """Unpatched, it asks torch for its compiler, which takes as long to import as all of Megatron."""
    begin = (
        "from mcore_mas.megatron.spec import init_process_groups as begin; begin(rank=0, threads=1)"
    )
    folders = [
        f"import mcore_mas.megatron.{folder}"
        for folder in ("model.build", "state.sharded", "step.trainer")
    ]
    for line in (begin, *folders) if not torch.cuda.is_available() else ():
        modules = loaded(line)
        assert "megatron.core" in modules and "torch._dynamo" not in modules, line


def loaded(*lines: str) -> set[str]:
    """Return the modules that a new process has imported after these lines."""
    command = [sys.executable, "-c", "\n".join([*lines, "import sys; print(*sys.modules)"])]
    return set(
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    )


def test_test_modules_have_unique_names() -> None:
    """pytest imports a test module by its file's name alone if its folder is no package."""
    alone = [
        path
        for path in OTHERS
        if path.name.startswith("test_") and not (path.parent / "__init__.py").exists()
    ]
    assert [name for name, times in Counter(path.name for path in alone).items() if times > 1] == []


def test_each_rule_has_a_script_of_its_name() -> None:
    rule = re.compile(r"^rule (\w+):\n((?:\n|    .*\n)*)", re.MULTILINE)
    rules = set()
    for path in (ROOT / "workflow" / "rules").glob("*.smk"):
        for name, body in rule.findall(path.read_text(encoding="utf-8")):
            if "    shell:" not in body:
                rules.add(name)
    assert {path.stem for path in (ROOT / "workflow/scripts").glob("*.py")} == rules
