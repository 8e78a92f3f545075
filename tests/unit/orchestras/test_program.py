"""The orchestra `program`: functions and commands at the gateway, and their failures."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.training.metrics import describe_crashed_programs, rollout_metrics
from rollout.base import async_tasks
from rollout.base.errors import EngineError
from rollout.base.http_server import SERVER
from rollout.config.agents import AgentConfig
from rollout.config.orchestra import OrchestraConfig
from rollout.engines.remote import RemoteConfig
from rollout.engines.remote.client import RemoteClient
from rollout.orchestras.program import Job, ProgramRules, check_program, program
from rollout.records.trajectory import Group, Status, Trajectory, Turn
from rollout.rewards import ALLOCATORS
from rollout.sandbox.guest.filters import can_confine
from rollout.teams.team import Team
from rollout.teams.tree import Branching
from tests.support.agent_programs import alive, script
from tests.support.chat_server import chat_server, says
from tests.support.gateway import scripted_team
from tests.support.play import SEED, STEP, TASK, Adder, collect

PROGRAMS = "tests.support.agent_programs"
SHORT_DEADLINE = ProgramRules(deadline_s=0.2)
CRASH_FAILS = ProgramRules(crash="fail")


def play(
    folder: Path, *, group_size: int = 1, reply: Any = lambda prompt, n: "7", **options: Any
) -> Group:
    team, _ = scripted_team(folder / "model", reply)
    orchestra = partial(program, **options)
    played = collect(
        [TASK],
        team,
        Adder,
        orchestra,
        group_size=group_size,
        seed=SEED,
        step=STEP,
        quarantine=folder / "quarantine",
    )
    return asyncio.run(played)[0]


def play_one(*args: Any, **options: Any) -> Trajectory:
    return play(*args, **options).trajectories[0]


def test_a_function_plays_and_its_turns_are_rewarded(tmp_path: Path) -> None:
    group = play(tmp_path, call=f"{PROGRAMS}:two_numbers", models={"gpt-4o": "a"}, group_size=2)
    for trajectory in group.trajectories:
        assert (trajectory.error, trajectory.outcome) == ("", 7.0)
        assert sorted(turn.agent for turn in trajectory.turns) == ["a", "b"]
        assert [turn.scores["team"] for turn in trajectory.turns] == [7.0, 7.0]
    rewarded = ALLOCATORS["shared_outcome"](group)
    assert [turn.reward for t in rewarded.trajectories for turn in t.turns] == [7.0] * 4


@pytest.mark.parametrize(
    "options", [{"call": f"{PROGRAMS}:two_numbers"}, {"command": script("answer = answer + ' '")}]
)
def test_programs_call_the_gateway_without_a_proxy(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # a port without a server
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "example.org")
    assert play_one(tmp_path, models={"gpt-4o": "a"}, **options).error == ""
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.org,127.0.0.1,localhost"


@pytest.mark.slow
def test_commands_run_without_a_shell_and_forty_share_the_machine(tmp_path: Path) -> None:
    trajectory = play_one(tmp_path, command=script("answer = answer + ' '"))
    assert (trajectory.error, trajectory.outcome) == ("", 7.0)
    assert trajectory.turns[0].messages[0].content == TASK.prompt
    words = [*script("answer = len(sys.argv[1])"), "$(false) `false`"]
    group = play(tmp_path, command=words, group_size=40, rules=ProgramRules(at_once=16))
    assert [t.outcome for t in group.trajectories] == [16.0] * 40


def reply_and_kill_the_server(prompt: str, call: int) -> str:
    """Cancel the task that serves the gateway, and reply 7."""
    for task in asyncio.all_tasks():
        if task.get_name() == SERVER:
            task.cancel()
    return "7"


def test_trajectories_fail_if_the_gateways_server_has_ended(tmp_path: Path) -> None:
    group = play(
        tmp_path, group_size=3, reply=reply_and_kill_the_server, call=f"{PROGRAMS}:patient"
    )
    assert [trajectory.status for trajectory in group.trajectories] == ["failed"] * 3
    expected = r"gateway: the HTTP server at http://127\.0\.0\.1:\d+ has ended \(cancelled\)"
    for trajectory in group.trajectories:
        assert re.search(expected, trajectory.error), trajectory.error


@pytest.mark.parametrize(
    ("options", "status", "error"),
    [
        (
            {"call": f"{PROGRAMS}:broken", "models": {"*": "a"}, "rules": CRASH_FAILS},
            "failed",
            "ProgramFailed: RuntimeError: the program br",
        ),
        (
            {"command": script("raise SystemExit('no')"), "rules": CRASH_FAILS},
            "failed",
            "ended with status 1: no$",
        ),
        ({"command": ["/nowhere/at/all"]}, "failed", "No such file"),
        ({"command": ["/bin/sh", "-c", "yes"]}, "failed", "it printed more than 1048576 bytes"),
        (
            {"command": ["/bin/sh", "-c", "kill -9 $$"]},
            "failed",
            "ended with status -9: its standard error is empty",
        ),
        ({"call": f"{PROGRAMS}:exits"}, "failed", "ProgramFailed: SystemExit: 3"),
        ({"call": f"{PROGRAMS}:gives_up"}, "failed", "ProgramFailed: CancelledError: "),
        (
            {"call": f"{PROGRAMS}:asleep", "rules": SHORT_DEADLINE},
            "late",
            "program: nothing came within 0.2 s$",
        ),
        (
            {"command": ["/bin/sleep", "77"], "rules": SHORT_DEADLINE},
            "late",
            "program: nothing came within 0.2 s$",
        ),
    ],
)
def test_a_failed_program_fails_only_its_trajectory(
    tmp_path: Path, options: dict[str, Any], status: str, error: str
) -> None:
    started_s = time.monotonic()
    trajectory = play_one(tmp_path, **options)
    assert (trajectory.status, trajectory.outcome) == (Status(status), None)
    assert re.search(error, trajectory.error)
    assert len(list((tmp_path / "quarantine").glob("*"))) == (status == "failed")
    assert time.monotonic() - started_s < 20


def test_the_deadline_holds_for_a_function_that_ignores_its_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_tasks, "CLEANUP_S", 0.2)
    trajectory = play_one(tmp_path, call=f"{PROGRAMS}:stubborn", rules=SHORT_DEADLINE)
    assert trajectory.status is Status.LATE
    assert trajectory.error.endswith(
        "nothing came within 0.2 s; it goes on though cancelled, and was left behind"
    )


async def misspelt(job: Job) -> str:
    return f"{job.task.prompt} {job.problm}"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "needs either call"),
        ({"call": "a:b", "command": ["c"]}, "needs either call"),
        (
            {"call": "a:b", "deadline_s": 300},
            "orchestra 'program' has no option 'deadline_s'; its options: call, command, models, sandbox, rules",
        ),
        (
            {"call": f"{PROGRAMS}:nobody"},
            "agent program 'tests.support.agent_programs:nobody' cannot be imported",
        ),
        ({"call": f"{PROGRAMS}:script"}, "must take (job) as an async function"),
        (
            {"call": f"{__name__}:misspelt"},
            f"agent program '{__name__}:misspelt': job.problm: Job has no 'problm'; nearest: problem",
        ),
        (
            {"call": f"{PROGRAMS}:broken", "models": {"x": "c"}},
            "'x' is agent 'c', who is not in the team; agents: a, b",
        ),
    ],
)
def test_an_invalid_program_is_refused_with_the_config(options: dict[str, Any], error: str) -> None:
    team = {name: AgentConfig(policy="p", role="program_agent") for name in ("a", "b")}
    with pytest.raises(ValueError, match=re.escape(error)):
        OrchestraConfig(name="program", options=options).check_agents(team)


def test_the_team_of_the_guide_is_valid() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()
    (block,) = re.findall(r"```yaml\n# configs/team/mine.yaml\n(.*?)```", guide, re.S)
    values = yaml.safe_load(block)
    team = {name: AgentConfig(policy="p", **agent) for name, agent in values["agents"].items()}
    orchestra = OrchestraConfig(**values["orchestra"])
    orchestra.check_agents(team)
    assert orchestra.arguments["command"] == ["python", "my_agents.py"]
    assert orchestra.arguments["models"] == {"gpt-4o": "solver", "*": "helper"}
    demo = resolve(["experiment=demo_program"])
    assert (
        demo["orchestra"]["options"]["call"] == "rollout.orchestras.example_program:solve_and_check"
    )


def test_remote_models_play_beside_trained_policies(tmp_path: Path) -> None:
    """One policy is trained; the other is a remote model, whose turns are text and are masked."""

    async def run() -> tuple[Turn, ...]:
        team, _ = scripted_team(tmp_path, lambda prompt, n: "7")
        with chat_server(says("5", prompt=9, reply=2)) as server:
            remote = RemoteConfig(model="friend", url=server.url, retries=0, timeout_s=5.0)
            client = RemoteClient(remote, tmp_path / "remote")
            agents = {**team.agents, "b": replace(team.agents["b"], policy="friend")}
            session = Team(agents, {**team.policies, "friend": client}).session(1)
            orchestra = partial(program, call=f"{PROGRAMS}:two_numbers", models={"gpt-4o": "a"})
            await orchestra(TASK, session, Adder(TASK))
            await client.aclose()
            return session.turns

    trained, remote = sorted(asyncio.run(run()), key=lambda turn: turn.agent)
    assert (trained.agent, trained.text, trained.masked, len(trained.completion_ids)) == (
        "a",
        "7",
        False,
        2,
    )
    assert (remote.agent, remote.text, remote.masked, remote.completion_ids) == ("b", "5", True, ())


def test_a_program_with_sequential_calls_can_branch(tmp_path: Path) -> None:
    """Each of the two calls is sampled twice, and one sample continues."""
    team, engine = scripted_team(tmp_path, lambda prompt, n: str(n))
    orchestra = partial(program, call=f"{PROGRAMS}:in_turn")
    played = collect(
        [TASK], team, Adder, orchestra, group_size=1, seed=SEED, step=STEP, tree=Branching(width=2)
    )
    (trajectory,) = asyncio.run(played)[0].trajectories
    assert trajectory.error == ""
    assert [(turn.agent, turn.node) for turn in trajectory.turns] == [
        ("a", "0"),
        ("a", "1"),
        *(("b", f"{trajectory.leaf.partition('.')[0]}.{n}") for n in range(2)),
    ]
    assert len(engine.calls) == 4
    assert trajectory.outcome == float(trajectory.path[-1].text)


class Graded(Adder):
    """Environment that gives 0 for an empty answer."""

    async def step(self, action: str) -> Any:
        return await super().step(action or "0")


def test_a_crash_after_an_answered_call_counts_as_a_wrong_answer(tmp_path: Path) -> None:
    team, _ = scripted_team(tmp_path, lambda prompt, n: "7")
    orchestra = partial(program, call=f"{PROGRAMS}:broken", models={"*": "a"})
    (group,) = asyncio.run(
        collect([TASK], team, Graded, orchestra, group_size=2, seed=SEED, step=STEP)
    )
    for trajectory in group.trajectories:
        assert (trajectory.error, trajectory.outcome) == ("", 0.0)
        assert [turn.scores.get("crashed") for turn in trajectory.turns] == [None, 1.0]
        (event,) = trajectory.tools
        assert (event.tool, event.failed, event.after_turn) == ("program", True, 1)
        assert event.result == "RuntimeError: the program broke"
    assert rollout_metrics([group])["gateway/crashed"] == 2.0
    assert describe_crashed_programs([group]) == (
        "2 of 2 programs failed after an answered call and count as wrong "
        f"(orchestra.options.rules.crash); the first, sample 0 of task {TASK.id}: "
        "RuntimeError: the program broke"
    )


async def answers_from_its_cache(job: Job) -> str:
    return "4"


async def asks_for_a_picture(job: Job) -> str:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = {"model": "a", "messages": [{"role": "user", "content": [picture]}]}
    headers = {"Authorization": f"Bearer {job.key}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
        for _ in range(2):
            response = await client.post(f"{job.openai_url}/chat/completions", json=body)
            assert response.status_code == 400
    return "4"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("answers_from_its_cache", "Either the client answered from a cache of replies"),
        (
            "asks_for_a_picture",
            "calls that the gateway refused: 2, the last with: a content part has the type "
            "'image_url'",
        ),
    ],
)
def test_a_trajectory_without_a_call_fails_and_says_why(
    function: str, reason: str, tmp_path: Path
) -> None:
    trajectory = play_one(tmp_path, call=f"{__name__}:{function}")
    assert (trajectory.status, trajectory.outcome) == (Status.FAILED, None)
    assert trajectory.error.startswith("Unasked: program: no trained agent was asked")
    assert reason in trajectory.error
    assert trajectory.metrics == {"unasked": 1.0}
    assert trajectory.failure_reason == "unasked"
    assert not (tmp_path / "quarantine").exists()  # there is nothing to replay


def test_clients_are_pointed_to_the_gateway_and_their_caches_to_the_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer counts the variables that hold the gateway's address, and the cache's new folders."""
    for name in ("OPENAI_API_BASE", "DSPY_CACHEDIR"):
        monkeypatch.setenv(name, "https://api.example.org/v1")
    check = """
url = os.environ["OPENAI_BASE_URL"]
names = ("OPENAI_API_BASE", "OPENAI_API_BASE_URL")
hosts = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "ANTHROPIC_API_URL", "ANTHROPIC_HOST", "OPENAI_HOST")
folders = ("DSPY_CACHEDIR", "CREWAI_STORAGE_DIR", "MEM0_DIR")
answer = 100 * sum(os.environ[name] == url for name in names)
answer += 10 * sum(os.environ[name] + "/v1" == url for name in hosts)
for name in folders:
    os.makedirs(os.environ[name])
    answer += 1
"""
    group = play(tmp_path, command=script(check), group_size=2)
    assert [(t.error, t.outcome) for t in group.trajectories] == [("", 253.0)] * 2


def test_processes_that_a_command_leaves_behind_are_ended(tmp_path: Path) -> None:
    marker = f"{time.time_ns() % 10**9}.25"
    trajectory = play_one(
        tmp_path,
        command=script(f"os.system('sleep {marker} &')"),
        rules=ProgramRules(deadline_s=20),
    )
    assert (trajectory.error, trajectory.outcome) == ("", 7.0)
    assert not alive(marker)
    detached = play_one(
        tmp_path,
        command=script("os.system('setsid sleep 30 &')"),
        rules=ProgramRules(deadline_s=20),
    )
    # A process of another group is not awaited.
    assert (detached.error, detached.outcome) == ("", 7.0)
    late = play_one(
        tmp_path,
        command=["/bin/sh", "-c", f"sleep {marker} & sleep {marker}"],
        rules=SHORT_DEADLINE,
    )
    assert late.status is Status.LATE
    assert not alive(marker)


def test_the_key_of_a_command_is_in_no_record_and_no_list_of_processes(
    tmp_path: Path,
) -> None:
    listing = """
import glob
key, listed = os.environ["OPENAI_API_KEY"], 0
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try: listed += key.encode() in open(path, "rb").read()
    except OSError: pass
answer = f"{key} is listed {listed} times"
print(f"{key} is the key", file=sys.stderr)
if len(sys.argv) > 1:
    sys.exit(1)
"""
    completed = play_one(tmp_path, command=script(listing))
    # The environment refuses an answer that is no number.
    assert "'[key] is listed 0 times'" in completed.error
    failed = play_one(tmp_path, command=[*script(listing), "1"], rules=CRASH_FAILS)
    assert failed.error.endswith("ended with status 1: [key] is the key")
    record_files = [path for path in (tmp_path / "quarantine").rglob("*") if path.is_file()]
    assert record_files and not [
        path for path in record_files if re.search(rb"sk-[\w-]{20}", path.read_bytes())
    ]


@pytest.mark.skipif(
    not can_confine(), reason="needs Linux 6.12, whose Landlock knows ports and signals"
)
def test_a_command_in_the_sandbox_reaches_the_gateway_and_nothing_else(tmp_path: Path) -> None:
    """The answer has the model's reply, the number of allowed and that of refused actions that work."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "data.txt").write_text("mine")
    (tmp_path / "secret.txt").write_text("yours")
    other_server = socket.create_server(("127.0.0.1", 0))
    other_address = other_server.getsockname()
    probe = f"""
import openai, socket, subprocess, tempfile
from pathlib import Path
folder = Path({str(tmp_path)!r})
def works(act):
    try:
        act()
        return 1
    except OSError:
        return 0
allowed = [
    works(lambda: (folder / "mine" / "data.txt").read_text()),
    works(lambda: tempfile.NamedTemporaryFile().write(b"x")),
    works(lambda: (Path.home() / "x").write_text("x")),
    works(lambda: subprocess.run(["true"], check=True)),
]
refused = [
    works(lambda: (folder / "secret.txt").read_text()),
    works(lambda: (folder / "mine" / "data.txt").write_text("x")),
    works(lambda: (folder / "new").write_text("x")),
    works(lambda: socket.create_connection({other_address!r}, 5)),
    works(lambda: socket.socket().sendto(b"x", socket.MSG_FASTOPEN, {other_address!r})),
    works(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
    works(lambda: socket.socket(socket.AF_UNIX)),
    works(lambda: socket.create_server(("127.0.0.1", 0))),
    works(lambda: os.kill(os.getppid(), 0)),
    works(os.setsid),
]
(folder / "mine" / "data.txt").chmod(0)
answer = int(answer) * 100 + sum(allowed) * 10 + sum(refused)
"""
    with other_server:
        trajectory = play_one(tmp_path, command=script(probe), sandbox=[str(tmp_path / "mine")])
    assert (trajectory.error, trajectory.outcome) == ("", 740.0)
    assert (tmp_path / "mine" / "data.txt").stat().st_mode == (
        tmp_path / "secret.txt"
    ).stat().st_mode
    with pytest.raises(ValueError, match="sandbox: the path '/nowhere' does not exist"):
        check_program(["a"], command=["x"], sandbox=["/nowhere"])


def test_a_failed_engine_fails_the_trajectory_even_if_the_program_answers(
    tmp_path: Path,
) -> None:
    def fail(prompt: str, call: int) -> str:
        raise EngineError("out of order")

    quiet = script().copy()
    quiet[-1] = f"try:\n{textwrap.indent(quiet[-1], '  ')}\nexcept Exception:\n  print(5)"
    trajectory = play_one(tmp_path, command=quiet, reply=fail)
    assert (trajectory.status, trajectory.error) == (Status.FAILED, "EngineError: out of order")
