"""The commands of the documents' shell blocks, and of the table of commands, are run in a folder with a small run.

`make test-documents` also runs those that take longer. tests/support/documents.py says what runs the others, and why.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pexpect
import pytest
import yaml

from retrieval.build import build_index
from retrieval.corpus import Passage, write_corpus
from retrieval.encoder import Encoder
from rollout.environments.games import PUZZLES
from rollout.records.files import write_tasks, write_trajectories
from rollout.tasks.puzzles import draw_puzzle_tasks
from tests.support.browser import BINARY, Browser, needs_chromium
from tests.support.commands import called
from tests.support.documents import BLOCKS, HERE, LONG, RUN_BY, STORIES, TABLE_COMMANDS, runner
from tests.support.played_games import play_game
from tests.support.run_folder import make_run
from tests.support.tiny_bert import write_bert

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.multirank, pytest.mark.usefixtures("forked_programs")]
PROGRAMS = {"mcore-mas": "mcore_mas", "snakemake": "snakemake"}  # their modules
SMALL_RUN = [
    "data.train=12",
    "data.validation=2",
    "data.test=2",
    "trainer.tasks_per_step=2",
    "trainer.group_size=2",
    "trainer.steps=2",
    "trainer.validate_every=100",
    "evaluation.samples=1",
    "cold_start=null",
]


def block_commands() -> list[str]:
    """Return the commands of the shell blocks of all pages whose blocks no other test runs in their order."""
    commands = []
    for block in BLOCKS:
        if block.language == "sh" and block.page not in STORIES:
            commands.extend(block.lines)
    return commands


COMMANDS = list(dict.fromkeys([*TABLE_COMMANDS, *block_commands()]))
# commands that only read; one process calls all of them
READING = r"mcore-mas (check|compare|explain|list|ls|show)\b"
# commands that run until Ctrl-C, and the path that each is asked for; "/" for the others
SERVERS = r"mcore-mas (studio|serve|ui)|make (ui|retriever)"
SERVER_PATHS = {"serve": "/v1/models", "retriever": "/health"}
# by command, a file that it writes
WRITES = {
    "mcore-mas new my_team": "my_team/my_team.yaml",
    "mcore-mas train results/demo_math": "results/demo_math/train/done.json",
    "mcore-mas evaluate results/demo_math --state trained": "results/demo_math/evaluation/trained.json",
    "mcore-mas export results/demo_math solver --to exported": "exported/config.json",
    "mcore-mas show results/demo_path/evaluation/trained --picture pictures/": "pictures",
    "mcore-mas show results/demo_math/evaluation/trained --html page.html": "page.html",
}
# by command, a pattern in its output; most commands have more tests of their own
PRINTS = {
    "mcore-mas check my_suite.yaml": r"^ok: demo$",
    "mcore-mas ls": r"demo_math │ 2/2 done",
    "mcore-mas compare results/a results/b": (
        r"^ trained +│ avg@1 .* \+0\.0 (.*\n)*^ seed +│ 1 +│ 2 +$"
    ),
    "mcore-mas show demo_math --index 3": r"^step 2   task .*   id 1/",
    "mcore-mas explain demo_math --advantage drmas": r"agent solver",
    "mcore-mas leaks demo_math": r"the same text",
    "mcore-mas list estimators": r"^drmas$",
    "mcore-mas doctor": r"packages",
    "mcore-mas run my_suite.yaml trainer.steps=3 -n": r"train",
    "snakemake -n --configfile my_suite.yaml": r"train",
}


class Folder:
    """A folder with a checkout's files, small runs, and the programs of the pages on its PATH."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in (
            "Makefile",
            "Snakefile",
            "workflow",
            "profiles",
            "configs",
            "pyproject.toml",
            "requirements",
        ):
            (path / name).symlink_to(ROOT / name)
        (path / ".venv").symlink_to(sys.prefix)
        (path / "bin").mkdir()
        for name, module in PROGRAMS.items():
            script = path / "bin" / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            script.chmod(0o755)
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        (path / "my_results").mkdir()
        (path / "elsewhere").mkdir()
        self.env |= {"PATH": f"{path / 'bin'}:{os.environ['PATH']}", "NO_PROXY": "*"}
        self._make_runs()

    def _make_runs(self) -> None:
        """Make results/demo_math, my_suite.yaml, and a played game in results/demo_path."""
        one_policy = ("agents.verifier.policy=solver", "~policies.verifier", "policies.solver.tp=1")
        two_steps = ("trainer.steps=2", "evaluation.samples=1", "trainer.checkpoint_every=1")
        model = make_run(self.path / "results", *one_policy, *two_steps) / "base"

        models = [f"policies.{name}.model={model}" for name in ("solver", "verifier")]
        overrides = ["experiment=demo_math", *SMALL_RUN, *models]
        suite = {"suite": "mine", "experiments": {"demo": overrides}}
        (self.path / "my_suite.yaml").write_text(yaml.safe_dump(suite))

        tasks = draw_puzzle_tasks(PUZZLES["plan_path"](size=4), 3, {"test": 1})
        game = self.path / "results/demo_path"
        write_tasks(game / "tasks/test.parquet", tasks)
        played = play_game(tasks[0], f"#### {tasks[0].answers[0]}")
        write_trajectories(game / "evaluation/trained/part_0.parquet", [played])

    def run(self, line: str, statuses: Sequence[int] = (0,)) -> str:
        """Run a command, check that it ends with one of the statuses, and return its output."""
        words = shlex.split(line)
        if words[0] in PROGRAMS and not re.search(r"[|&;<>$]", line):
            command = [sys.executable, "-m", PROGRAMS[words[0]], *words[1:]]  # starts as a fork
        else:
            command = ["bash", "-euo", "pipefail", "-c", line]
        completed = subprocess.run(
            command, cwd=self.path, env=self.env, capture_output=True, text=True, timeout=900
        )
        output = f"{completed.stdout[-3000:]}{completed.stderr[-5000:]}"
        assert completed.returncode in statuses, f"{line}\n{output}"
        return completed.stdout + completed.stderr

    @contextmanager
    def serving(self, line: str) -> Iterator[str]:
        """Start a server, yield the address that it prints, and stop it by Ctrl-C."""
        log = self.path / "server.log"
        with log.open("w") as output:
            command = ["bash", "-c", f"exec {line}"]
            process = subprocess.Popen(
                command, cwd=self.path, env=self.env, stdout=output, stderr=output, process_group=0
            )
        try:
            url = re.compile(r"http://[\w.:]+\d")
            until(lambda: process.poll() is not None or url.search(log.read_text()), 200)
            address = url.search(log.read_text())
            assert address and process.poll() is None, f"{line}\n{log.read_text()}"
            yield address[0]
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(60)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        interrupted = (130, 2, -signal.SIGINT)  # the latter two by make
        assert process.returncode in (0, *interrupted), log.read_text()


def until(condition: Callable[[], object], seconds: float) -> None:
    """Wait until a condition holds, and fail after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("documents") / "checkout"
    (path / "results").mkdir(parents=True)
    return Folder(path)


@dataclass(frozen=True)
class Watched:
    """Times of a training that the studio showed.

    Attributes:
        written: by step, when it was in metrics.jsonl.
        shown: by step, when the page showed it.
        poll_interval: seconds between two polls of the page, at most.
    """

    written: dict[int, float]
    shown: dict[int, float]
    poll_interval: float


WATCH = """window.seen = []; const facts = document.getElementById('facts');
new MutationObserver(() => seen.push([Date.now() / 1000, facts.textContent])).observe(facts, {childList: true}); 0"""
POLLS = (
    "performance.getEntriesByType('resource')"
    ".filter(e => e.name.includes('/api/metrics')).map(e => e.startTime)"
)


@pytest.fixture(scope="module")
def trained(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Watched | None:
    """Train and evaluate demo_math; with Chromium, also watch the training in the studio."""
    watched = None
    if BINARY is None:
        folder.run("mcore-mas train results/demo_math")
    else:
        with (
            folder.serving("mcore-mas studio --port 0") as url,
            Browser(f"{url}/#demo_math", tmp_path_factory.mktemp("profile")) as page,
        ):
            watched = watch(folder, page)
            assert all(request.startswith(f"{url}/") for request in page.requests), page.requests
    folder.run("mcore-mas evaluate results/demo_math --state trained")
    # two copies with different seeds, for `compare`
    for run, seed in (("a", "seed: 1"), ("b", "seed: 2")):
        copy = shutil.copytree(folder.path / "results/demo_math", folder.path / "results" / run)
        config = copy / "config.yaml"
        config.write_text(re.sub("^seed: .*", seed, config.read_text(), flags=re.MULTILINE))
    return watched


def watch(folder: Folder, page: Browser) -> Watched:
    """Train while the studio is open, and record when each step is written and shown."""
    metrics_file = folder.path / "results/demo_math/train/metrics.jsonl"
    written: dict[int, float] = {}
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(0.005):
            lines = metrics_file.read_text().splitlines() if metrics_file.is_file() else []
            for line in lines[len(written) :]:
                written[json.loads(line)["step"]] = time.time()

    page.until("document.getElementById('title').textContent === 'demo_math'")
    page.value(WATCH)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        folder.run("mcore-mas train results/demo_math")
        page.until("document.getElementById('facts').textContent === 'trained for 2 steps'")
    finally:
        ended.set()
        reader.join()
    changes = page.value("seen")
    # The page says "step 1 of 2", and at the end "trained for 2 steps".
    steps_shown = [(time_, int(re.findall(r"\d+", text)[0])) for time_, text in changes]
    shown = {step: min(time_ for time_, steps in steps_shown if steps > step) for step in (0, 1)}
    polls_ms = page.value(POLLS)
    intervals_ms = [later - earlier for earlier, later in itertools.pairwise(polls_ms)]
    return Watched(written, shown, max(intervals_ms) / 1000)


@needs_chromium
def test_a_finished_step_is_in_the_page_within_two_seconds(trained: Watched) -> None:
    """On a machine so busy that the page polls late, a step is shown within two polls."""
    delays = {step: shown - trained.written[step] for step, shown in trained.shown.items()}
    print(f"seconds from the file to the page: {delays}, poll interval {trained.poll_interval:.2f}")
    bound = max(2.0, 2 * trained.poll_interval)
    assert all(-0.1 < seconds < bound for seconds in delays.values()), (delays, bound)


def status_of(url: str) -> int:
    """Return the HTTP status of an address, or 0 if no server listens there yet."""
    try:
        return int(urllib.request.urlopen(url).status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except urllib.error.URLError:
        return 0


@pytest.fixture(scope="module")
def outputs(folder: Folder, trained: Watched | None) -> dict[str, str]:
    """Output of the commands that only read, by command."""
    lines = [line for line in COMMANDS if runner(line) == HERE and re.match(READING, line)]
    return dict(zip(lines, called(lines, folder.path, folder.env), strict=True))


def run_and_check(line: str, folder: Folder) -> None:
    """Run a command; a server must answer, and other commands must print and write what they should."""
    if not re.match(SERVERS, line):
        # The doctor misses memory for the demo while other tests use it.
        statuses = (0, 1) if line == "mcore-mas doctor" else (0,)
        check(line, folder, folder.run(line, statuses))
        return
    path = next((path for word, path in SERVER_PATHS.items() if word in line), "/")
    with folder.serving(line) as url:
        until(lambda: status_of(url + path) == 200, 120)  # MLflow prints its address first


def check(line: str, folder: Folder, output: str) -> None:
    """Check what a command printed and wrote."""
    assert re.search(PRINTS.get(line, ""), output, re.MULTILINE), output
    assert line not in WRITES or (folder.path / WRITES[line]).exists(), output


@pytest.mark.parametrize("line", [line for line in COMMANDS if runner(line) == HERE])
def test_a_command_runs(line: str, folder: Folder, outputs: dict[str, str]) -> None:
    if re.match("mcore-mas (train|evaluate) ", line):
        assert (folder.path / WRITES[line]).is_file()  # the fixture `trained` has run it
    elif line.startswith("mcore-mas chat "):
        talk(line, folder)
    elif line in outputs:
        check(line, folder, outputs[line])
    else:
        run_and_check(line, folder)


def talk(line: str, folder: Folder) -> None:
    """Chat at a terminal of 80 columns, and end it by Ctrl-C in the middle of a line."""
    chat = pexpect.spawn(
        "bash",
        ["-c", f"exec {line}"],
        cwd=folder.path,
        env=folder.env,
        timeout=120,
        encoding="utf-8",
    )
    chat.setwinsize(24, 80)
    for prompt in ("What is 3+4?", "Wörter \u202e"):
        chat.expect_exact("you: ")
        chat.sendline(prompt)
        chat.expect_exact("user → solver")
        chat.expect_exact("0 solver")
    chat.expect_exact("you: ")
    assert "outcome" not in chat.before and "\\u202e" in chat.before
    chat.send("and")
    chat.sendintr()
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 130, chat.before


@pytest.mark.parametrize(
    "line", [line for line in COMMANDS if runner(line) == LONG and "curl" not in line]
)
def test_a_command_that_takes_longer_runs(
    line: str, folder: Folder, trained: Watched | None, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--documents"):
        pytest.skip("takes minutes, or a port that may be taken; `make test-documents` runs it")
    if line.startswith("mcore-mas serve results/demo_math --port"):
        with folder.serving(line):
            models, completion = (folder.run(one) for one in COMMANDS if one.startswith("curl"))
        assert '"demo_math"' in models
        assert json.loads(completion)["choices"][0]["message"]["role"] == "assistant"
        return
    if "retriever" in line:
        numbers = range(10, 19)
        passages = [Passage.compose(str(n), f"Town {n}", f"It has {n} mills.") for n in numbers]
        write_corpus(folder.path / "towns.jsonl", passages)
        write_bert(folder.path / "models/e5-base-v2", [one.text for one in passages], 1)
        encoder = Encoder.of("e5", folder.path / "models/e5-base-v2")
        build_index(folder.path / "towns.jsonl", folder.path / "data/wiki-18", encoder)
    if "--store" in line:
        shutil.copy(folder.path / "results/mlflow.db", folder.path / "elsewhere")
    run_and_check(line, folder)


def test_every_line_has_something_that_runs_it() -> None:
    """Each runner of tests/support/documents.py exists, and each of its patterns matches a command."""
    makefile = (ROOT / "Makefile").read_text()
    for line in COMMANDS:
        by = runner(line)
        if by.startswith("make "):
            assert f"\n{by.removeprefix('make ')}:" in makefile, by
        elif by not in ("itself", "nothing"):
            assert (ROOT / by).exists() or (ROOT / "tests" / by).is_file(), by
    assert {line for line in COMMANDS if runner(line) == "nothing"} == {
        "conda env create -f environment.yml && conda activate mcore-mas",
        "conda env create -f retrieval/environment.yml",
        "bash environment.post-deploy.sh",
    }
    assert all(any(re.fullmatch(pattern, line) for line in COMMANDS) for pattern in RUN_BY)
