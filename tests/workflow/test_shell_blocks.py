"""The documents' commands, run in a folder with a small run: lines of shell blocks, and the README's table.

`make test-documents` runs also what takes longer; tests/support/documents.py says what runs the others, and why.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
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
SMALL = [
    "data.train=12",
    "data.validation=2",
    "data.test=2",
    "trainer.tasks_per_step=2",
    "trainer.group_size=2",
]
SMALL += [
    "trainer.steps=2",
    "trainer.validate_every=100",
    "evaluation.samples=1",
    "cold_start=null",
]
LINES = [
    line
    for block in BLOCKS
    if block.language == "sh" and block.page not in STORIES
    for line in block.lines
]
COMMANDS = list(dict.fromkeys([*TABLE_COMMANDS, *LINES]))
READING = r"mcore-mas (check|compare|doctor|explain|list|ls|show)\b"  # their lines are called by one process
SERVERS = r"mcore-mas (studio|serve|ui)|make (ui|retriever)"  # they run until Ctrl-C
ASKED = {"serve": "/v1/models", "retriever": "/health"}  # others by their first page
WRITES = {  # by command, a file that it leaves
    "mcore-mas new my_team": "my_team/my_team.yaml",
    "mcore-mas train results/demo_math": "results/demo_math/train/done.json",
    "mcore-mas evaluate results/demo_math --state trained": "results/demo_math/evaluation/trained.json",
    "mcore-mas export results/demo_math solver --to exported": "exported/config.json",
    "mcore-mas show results/demo_path/evaluation/trained --picture pictures/": "pictures",
    "mcore-mas show results/demo_math/evaluation/trained --html page.html": "page.html",
}
SAYS = {  # by command, words of what it prints; what lists, compares or draws says more in its own tests
    "mcore-mas check my_suite.yaml": r"^ok: demo$",
    "mcore-mas ls": r"demo_math │ 2/2 done",
    "mcore-mas compare results/a results/b": r"^ seed +│ 1 +│ 2 +\n(.*\n)* trained +│ avg@1 .* \+0\.0 ",
    "mcore-mas show demo_math --index 3": r"trajectory 1/",
    "mcore-mas explain demo_math --advantage drmas": r"agent solver",
    "mcore-mas leaks --config results/demo_math/config.yaml": r"the same text",
    "mcore-mas list estimators": r"^drmas$",
    "mcore-mas doctor": r"packages",
    "mcore-mas run my_suite.yaml trainer.steps=3 -n": r"train",
    "snakemake -n --configfile my_suite.yaml": r"train",
}


class Folder:
    """A checkout's files, in a folder of its own with small runs, and programs by their names."""

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
        for name, module in (("mcore-mas", "mcore_mas"), ("snakemake", "snakemake")):
            script = path / "bin" / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            script.chmod(0o755)
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        (path / "my_results").mkdir()
        (path / "elsewhere").mkdir()
        self.env |= {"PATH": f"{path / 'bin'}:{os.environ['PATH']}", "NO_PROXY": "*"}
        alone = ("agents.verifier.policy=solver", "~policies.verifier", "policies.solver.tp=1")
        few = ("trainer.steps=2", "evaluation.samples=1", "trainer.checkpoint_every=1")
        model = make_run(path / "results", *alone, *few) / "base"
        own = [
            "experiment=demo_math",
            *SMALL,
            *(f"policies.{name}.model={model}" for name in ("solver", "verifier")),
        ]
        (path / "my_suite.yaml").write_text(
            yaml.safe_dump({"suite": "mine", "experiments": {"demo": own}})
        )
        tasks = draw_puzzle_tasks(PUZZLES["plan_path"](size=4), 3, {"test": 1})
        write_tasks(path / "results/demo_path/tasks/test.parquet", tasks)
        game = [play_game(tasks[0], f"#### {tasks[0].answers[0]}")]
        write_trajectories(path / "results/demo_path/evaluation/trained/part_0.parquet", game)

    def run(self, line: str) -> str:
        """What a command prints that ends well."""
        command = ["bash", "-euo", "pipefail", "-c", line]
        done = subprocess.run(
            command, cwd=self.path, env=self.env, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-5000:]}"
        return done.stdout + done.stderr

    @contextmanager
    def serving(self, line: str) -> Iterator[str]:
        """The address that a server says it answers at; Ctrl-C ends it well."""
        log = self.path / "server.log"
        with log.open("w") as output:
            command = ["bash", "-c", f"exec {line}"]
            process = subprocess.Popen(
                command, cwd=self.path, env=self.env, stdout=output, stderr=output, process_group=0
            )
        try:
            url = re.compile(r"http://[\w.:]+\d")
            until(lambda: process.poll() is not None or url.search(log.read_text()), 200)
            found = url.search(log.read_text())
            assert found and process.poll() is None, f"{line}\n{log.read_text()}"
            yield found[0]
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(60)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode in (0, 2, 130, -signal.SIGINT), (
            log.read_text()
        )  # 2 and the signal are what make does


def until(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    (path := tmp_path_factory.mktemp("documents") / "checkout").mkdir()
    (path / "results").mkdir()
    return Folder(path)


@dataclass(frozen=True)
class Watched:
    """When each step of a training was in its file and in the page, and how long the page waited between polls."""

    written: dict[int, float]
    shown: dict[int, float]
    between: float


WATCH = """window.seen = []; const facts = document.getElementById('facts');
new MutationObserver(() => seen.push([Date.now() / 1000, facts.textContent])).observe(facts, {childList: true}); 0"""
POLLS = (
    "performance.getEntriesByType('resource')"
    ".filter(e => e.name.includes('/api/metrics')).map(e => e.startTime)"
)


@pytest.fixture(scope="module")
def trained(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Watched | None:
    """The README's training and evaluation; where there is Chromium, with the studio open in it meanwhile."""
    watched = None
    if BINARY is None:
        folder.run("mcore-mas train results/demo_math")
    else:
        with (
            folder.serving("mcore-mas studio --port 0") as url,
            Browser(f"{url}/#demo_math", tmp_path_factory.mktemp("profile")) as page,
        ):
            watched = watch(folder, page)
            assert all(asked.startswith(f"{url}/") for asked in page.asked), page.asked
    folder.run("mcore-mas evaluate results/demo_math --state trained")
    for run, seed in (("a", "seed: 1"), ("b", "seed: 2")):  # of another seed, with the same scores
        copy = shutil.copytree(folder.path / "results/demo_math", folder.path / "results" / run)
        (copy / "config.yaml").write_text(
            re.sub("^seed: .*", seed, (copy / "config.yaml").read_text(), flags=re.M)
        )
    return watched


def watch(folder: Folder, page: Browser) -> Watched:
    """Train while a page is open, and see when it shows what is written."""
    journal = folder.path / "results/demo_math/train/metrics.jsonl"
    written: dict[int, float] = {}
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(0.005):
            lines = journal.read_text().splitlines() if journal.is_file() else []
            written.update(
                {json.loads(line)["step"]: time.time() for line in lines[len(written) :]}
            )

    page.until("document.getElementById('title').textContent === 'demo_math'")
    page.value(WATCH)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        folder.run("mcore-mas train results/demo_math")
        page.until("document.getElementById('facts').textContent.startsWith('2 steps')")
    finally:
        ended.set()
        reader.join()
    seen, polls = page.value("seen"), page.value(POLLS)
    shown = {step: min(at for at, text in seen if int(text.split()[0]) > step) for step in (0, 1)}
    return Watched(written, shown, max(b - a for a, b in itertools.pairwise(polls)) / 1000)


@needs_chromium
def test_a_finished_step_is_in_the_page_within_two_seconds(trained: Watched) -> None:
    """By the clock, while the team trains; where the machine is so busy that the page polls late, within two polls."""
    late = {step: at - trained.written[step] for step, at in trained.shown.items()}
    print(f"seconds from the file to the page: {late}, between polls at most {trained.between:.2f}")
    assert all(-0.1 < seconds < max(2.0, 2 * trained.between) for seconds in late.values()), (
        late,
        trained.between,
    )


def answered(url: str) -> int:
    """The status of an answer, 0 where nobody listens yet."""
    try:
        return int(urllib.request.urlopen(url).status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except urllib.error.URLError:
        return 0


@pytest.fixture(scope="module")
def said(folder: Folder, trained: Watched | None) -> dict[str, str]:
    """What those of the lines print that only read, by line."""
    lines = [line for line in COMMANDS if runner(line) == HERE and re.match(READING, line)]
    return dict(zip(lines, called(lines, folder.path, folder.env), strict=True))


def run_and_check(line: str, folder: Folder) -> None:
    if re.match(SERVERS, line):
        path = next((path for word, path in ASKED.items() if word in line), "/")
        with folder.serving(line) as url:
            until(
                lambda: answered(url + path) == 200, 120
            )  # MLflow's address is told before it listens
        return
    check(line, folder, folder.run(line))


def check(line: str, folder: Folder, said: str) -> None:
    assert re.search(SAYS.get(line, ""), said, re.MULTILINE), said
    assert line not in WRITES or (folder.path / WRITES[line]).exists(), said


@pytest.mark.parametrize("line", [line for line in COMMANDS if runner(line) == HERE])
def test_a_command_runs(line: str, folder: Folder, said: dict[str, str]) -> None:
    if re.match("mcore-mas (train|evaluate) ", line):
        assert (folder.path / WRITES[line]).is_file()  # of `trained`
    elif line.startswith("mcore-mas chat "):
        talk(line, folder)
    elif line in said:
        check(line, folder, said[line])
    else:
        run_and_check(line, folder)


def talk(line: str, folder: Folder) -> None:
    """Several lines at a terminal of 80 columns, and Ctrl-D; then Ctrl-C in the middle of a line."""
    for end, status in ((pexpect.spawn.sendeof, 0), (pexpect.spawn.sendintr, 130)):
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
        chat.send("" if status == 0 else "and")
        end(chat)
        chat.expect(pexpect.EOF)
        chat.close()
        assert chat.exitstatus == status, chat.before


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
            listed, answered = (folder.run(one) for one in COMMANDS if one.startswith("curl"))
        assert (
            '"demo_math"' in listed
            and json.loads(answered)["choices"][0]["message"]["role"] == "assistant"
        )
        return
    if "retriever" in line:
        facts = [Passage.compose(str(n), f"Town {n}", f"It has {n} mills.") for n in range(10, 19)]
        write_corpus(folder.path / "towns.jsonl", facts)
        write_bert(folder.path / "models/e5-base-v2", [passage.text for passage in facts], 1)
        encoder = Encoder.of("e5", folder.path / "models/e5-base-v2")
        build_index(folder.path / "towns.jsonl", folder.path / "data/wiki-18", encoder)
    if "--store" in line:
        shutil.copy(folder.path / "results/mlflow.db", folder.path / "elsewhere")
    run_and_check(line, folder)


def test_every_line_has_something_that_runs_it() -> None:
    """What it names is there, and it is run nowhere only where the table says why."""
    made = (ROOT / "Makefile").read_text()
    for line in COMMANDS:
        by = runner(line)
        if by.startswith("make "):
            assert f"\n{by.removeprefix('make ')}:" in made, by
        elif by != "itself":
            assert by == "nothing" or (ROOT / by).exists() or (ROOT / "tests" / by).is_file(), by
    assert {line for line in COMMANDS if runner(line) == "nothing"} == {
        "conda env create -f environment.yml && conda activate mcore-mas",
        "conda env create -f retrieval/environment.yml",
        "bash environment.post-deploy.sh",
    }
    assert all(any(re.fullmatch(pattern, line) for line in COMMANDS) for pattern in RUN_BY)
