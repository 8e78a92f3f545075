"""Checks of an orchestra's source: slots, agents, and attributes of its team and environment."""

import asyncio
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from rollout.config.agents import AgentConfig
from rollout.config.orchestra import OrchestraConfig
from rollout.orchestras import ORCHESTRAS
from rollout.records.trajectory import Task
from rollout.teams.episode import Episode
from rollout.teams.source_checks import (
    chat_agents,
    describe_misuse,
    filled_slots,
    possible_agents,
    required_agents,
    template_slots,
)
from rollout.teams.team import TeamSession

# The agent of `relay`. Calls of the tests with its name as a literal would count as calls of helpers.
DRAFTER = "drafter"


async def relay(task, team, env):
    reply = await team.act("drafter", problem=task.prompt)
    slots = {"problem": task.prompt, "draft": reply.text}
    await team.act("editor", **slots)


def test_the_slots_of_an_orchestra_are_read_from_its_source() -> None:
    assert filled_slots(relay, DRAFTER) == {"problem"}
    # The slots of the editor are in a variable, which imported modules might have changed.
    assert filled_slots(relay, "editor") is None
    assert template_slots("a", "{problem} {draft.text} {{no}}") == ["problem", "draft"]
    assert template_slots("a", "{number:{width}}") == ["number", "width"]
    with pytest.raises(ValueError, match="a slot without a name"):
        template_slots("a", "{}")


def test_the_keywords_of_a_helper_are_not_taken_for_all_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helped.py").write_text(
        "async def ask(team, agent, task, tries):\n"
        "    await team.act(agent, question=task.prompt)\n"
        "async def play(task, team, env):\n"
        "    await ask(team, 'solver', task, tries=3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert filled_slots(import_module("helped").play, "solver") == {"question", "tries", "solver"}


def test_an_agent_in_a_variable_may_be_any_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looped.py").write_text(
        "async def play(task, team, env):\n"
        "    for agent in ('poet', 'critic'):\n"
        "        await team.act(agent, draft=task.prompt)\n"
        "    await team.act('critic', problem=task.prompt)\n"
        "    env.act()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert filled_slots(import_module("looped").play, "critic") == {"draft", "problem"}


def test_the_registration_of_an_agent_fills_no_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registered.py").write_text(
        "import mcore_mas as mm\n"
        "@mm.register_agent('own_poet', system='', user='{problem}')\n"
        "def parse(text): return text\n"
        "POET = mm.AgentSpec('own_poet', '{problem}', settings={})\n"
        "async def alone(task, team, env):\n"
        "    await team.act('own_poet', problem=task.prompt)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import registered

    assert filled_slots(registered.alone, "own_poet") == {"problem"}


def agents_by_source(
    sources: Mapping[str, str],
    read_agents: Callable[[Any], frozenset[str] | None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, frozenset[str] | None]:
    """Write each source to a module `agents_<name>`; return the agents of its orchestra `play`, by name."""
    for name, source in sources.items():
        (folder / f"agents_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    return {name: read_agents(import_module(f"agents_{name}").play) for name in sources}


def test_the_agents_of_chats_are_read_from_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestra = "async def play(task, team, env):\n    await team.act('clerk')\n"
    chat = "    team.chat('buyer')\n"
    sources = {
        "asks": orchestra,
        "chats": orchestra + chat,
        "helps": "def ask(team):\n" + chat + orchestra + "    ask(team)\n",
        "helps_by_keyword": "def ask(*, team):\n" + chat + orchestra + "    ask(team=team)\n",
        # The source does not say with whom, or what another module does with the team.
        "varies": orchestra + "    team.chat(task.source)\n",
        "keeps": orchestra + "    open = team.chat\n",
        "lends": "from helpers import ask\n" + orchestra + "    ask(team)\n",
        "renames": orchestra.replace("team", "us"),
        "lends_renamed": "from helpers import ask\ndef pass_on(us):\n    ask(us)\n"
        + orchestra
        + "    pass_on(team)\n",
    }
    (tmp_path / "helpers.py").write_text("def ask(team): ...\n")
    assert agents_by_source(sources, chat_agents, tmp_path, monkeypatch) == {
        "asks": frozenset(),
        "chats": {"buyer"},
        "helps": {"buyer"},
        "helps_by_keyword": {"buyer"},
        "varies": None,
        "keeps": None,
        "lends": None,
        "renames": None,
        "lends_renamed": None,
    }


def test_an_agent_that_the_orchestra_can_never_ask_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = "async def play(task, team, env):\n    if task.answers:\n"
    sources = {
        "writes": head + "        await team.act('solver')\n    team.chat('verifier')\n",
        "names": head + "        await team.act(task.source)\n    await team.act('solver')\n",
        "wrapped": "from wrappers import wrap\n@wrap\n"
        + head
        + "        await team.act('solver')\n",
    }
    sources["silent"] = "async def play(task, team, env):\n    await env.step('')\n"
    (tmp_path / "wrappers.py").write_text("def wrap(play): return play\n")
    agents = agents_by_source(sources, possible_agents, tmp_path, monkeypatch)
    assert agents == {
        "writes": {"solver", "verifier"},
        "names": None,
        "wrapped": None,
        "silent": frozenset(),
    }

    team = {
        name: AgentConfig(role="solver", policy="p", user="Solve it.")
        for name in ("solver", "verifier", "judge")
    }
    with pytest.raises(ValueError) as error:
        OrchestraConfig(name="agents_writes:play").check_agents(team)
    assert str(error.value) == (
        "agent 'judge' is never asked by orchestra 'agents_writes:play', so it would not be trained; ask it, or leave "
        "it out of the team; agents that are asked: solver, verifier"
    )
    with pytest.raises(ValueError, match=r"agent 'solver' is never asked .* are asked: none"):
        OrchestraConfig(name="agents_silent:play").check_agents(team)
    OrchestraConfig(name="agents_names:play").check_agents(team)
    del team["judge"]
    OrchestraConfig(name="agents_writes:play").check_agents(team)


def test_the_agents_and_slots_of_a_decorated_orchestra_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_chats.py").write_text(
        "from functools import wraps\n"
        "def named(play):\n"
        "    @wraps(play)\n"
        "    async def with_chat(task, team, env):\n"
        "        await team.chat('writer').ask(draft=task.prompt)\n"
        "        await play(task, team, env)\n"
        "    return with_chat\n"
        "def unnamed(play):\n"
        "    async def decorated(task, team, env):\n"
        "        await play(task, team, env)\n"
        "    return decorated\n"
        "def registered(play):\n"
        "    return play\n"
    )
    decorated = (
        "import with_chats\n"
        "@with_chats.{decorator}\n"
        "async def play(task, team, env):\n"
        "    await team.act('editor', problem=task.prompt)\n"
    )
    sources = {
        name: decorated.format(decorator=name) for name in ("named", "unnamed", "registered")
    }
    sources["helper"] = (
        decorated.format(decorator="registered").replace("play(", "ask(")
        + "async def play(task, team, env):\n    await ask(task, team, env)\n"
    )
    assert set(agents_by_source(sources, chat_agents, tmp_path, monkeypatch).values()) == {None}
    agents = agents_by_source(sources, required_agents, tmp_path, monkeypatch)
    assert set(agents.values()) == {frozenset()}
    del sources["helper"]
    slots = agents_by_source(
        sources, lambda play: filled_slots(play, "editor"), tmp_path, monkeypatch
    )
    assert set(slots.values()) == {None}


@pytest.mark.parametrize(
    "slots", ["{f'draft_{number}': 'a' for number in range(1)}", "{f'draft_{0}': 'a'}"]
)
def test_slots_with_computed_names_are_unknown(
    slots: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"async def play(task, team, env):\n    await team.act('judge', **{slots})\n"
    script = f"computed_{len(slots)}"
    (tmp_path / f"{script}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert filled_slots(import_module(script).play, "judge") is None


def test_slots_from_a_call_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spread.py").write_text(
        "async def relay(task, team, env):\n"
        "    await team.act('writer', **env.slots(task))\n"
        "    for _ in range(2):\n"
        "        reply = await team.act('editor', **{'problem': task.prompt})\n"
        "    if reply.value is None:\n"
        "        await team.act('rescuer')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import spread

    assert [filled_slots(spread.relay, agent) for agent in ("writer", "editor")] == [None, None]
    # The rescuer is called in a branch only, so a team without it is possible.
    assert required_agents(spread.relay) == {"writer", "editor"}
    # A module is no function, so it has no source of slots.
    assert filled_slots(spread, "writer") is None


@pytest.mark.parametrize(
    ("statement", "function"),
    [("from asking import ask", "ask"), ("import asking", "asking.ask")],
)
def test_slots_that_another_module_may_fill_are_unknown(
    statement: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asking.py").write_text(
        "async def ask(team, agent, task):\n    await team.act(agent, problem=task.prompt)\n"
    )
    script = f"{function.replace('.', '_')}_relay"
    (tmp_path / f"{script}.py").write_text(
        f"{statement}\n"
        "async def relay(task, team, env):\n"
        f"    await {function}(team, 'writer', task)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert filled_slots(import_module(script).relay, "writer") is None


def test_a_module_of_the_users_package_is_not_taken_for_one_of_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "office"
    package.mkdir()
    (package / "calendar.py").write_text(
        "async def ask(team, agent, task):\n    await team.act(agent, problem=task.prompt)\n"
    )
    (package / "relay.py").write_text(
        "from .calendar import ask\n"
        "async def relay(task, team, env):\n"
        "    await ask(team, 'writer', task)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert filled_slots(import_module("office.relay").relay, "writer") is None


async def revise(task, team, env):
    await team.act("editor", draft=(await team.act("writer")).text)


def test_an_agent_whose_reply_is_an_argument_is_asked() -> None:
    assert required_agents(revise) == {"writer", "editor"}


async def guarded(task, team, env):
    try:
        await team.act("writer")
    except* ValueError:
        pass


def test_an_agent_is_not_asked_unconditionally_in_a_try_of_exception_groups() -> None:
    assert required_agents(guarded) == frozenset()


async def filtered(task, team, env):
    drafts = (await team.act("lister")).text.split()
    return [await team.act("critic", draft=draft) for draft in drafts if draft]


async def mapped(task, team, env):
    return [
        await team.act("critic", draft=draft)
        for draft in (await team.act("lister")).text.split()
        if draft
    ]


async def unfiltered(task, team, env):
    return [await team.act("critic", draft=draft) for draft in ("one", "two")]


def test_an_agent_is_not_asked_unconditionally_in_a_comprehension_with_if() -> None:
    assert required_agents(filtered) == {"lister"}
    assert required_agents(mapped) == {"lister"}
    assert required_agents(unfiltered) == {"critic"}


async def ends_early(task, team, env, *, review=True):
    await team.act("writer")
    if not review:
        return
    await team.act("critic")


async def breaks(task, team, env):
    for _ in range(2):
        draft = await team.act("writer")
        if not draft.text:
            break
        await team.act("critic")


async def asks_after_a_loop(task, team, env):
    for _ in range(2):
        draft = await team.act("writer")
        if draft.value:
            break
    else:
        await team.act("rescuer")


async def asks_another_team(task, team, env):
    async with OTHERS.of(task) as team:
        await team.act("critic")


def test_an_agent_that_may_be_skipped_is_not_asked_unconditionally() -> None:
    assert required_agents(ends_early) == {"writer"}
    assert required_agents(breaks) == {"writer"}
    assert required_agents(asks_after_a_loop) == {"writer"}
    assert required_agents(asks_another_team) == frozenset()


def test_code_of_another_file_is_not_checked_against_the_file_of_its_caller(tmp_path: Path) -> None:
    script = tmp_path / "launched.py"
    script.write_text(
        "async def launched(task, team, env):\n    await team.act('drafter', story=task.prompt)\n"
    )
    # A launcher that executes a script gives its functions the launcher's module.
    launched = run_path(str(script), run_name=__name__)["launched"]
    assert filled_slots(launched, DRAFTER) is None


OTHERS: Any = None


async def valid(task, team, env):
    if hasattr(team, "pause"):
        team.pause()
    team.rounds = 2
    later = team.act("writer", rounds=team.rounds, scores=team.scores)
    reply = team.act("editor")
    reply = await reply
    await env.step(f"{await later} {reply.text}")
    _ = env.run("1 + 1"), await env.preview("1"), env.rewards


async def later_replies(task, team, env):
    reply = team.act("writer")
    for _ in range(2):
        reply = await reply
        reply = team.act(reply.value)
    reply = asyncio.ensure_future(reply)
    return reply.done()


async def rebound(task, team, env):
    with OTHERS.of(team) as team:
        await team.anything(task.prompt)


async def nested(task, team, env):
    await asyncio.gather(
        *(one.play(task) for one in OTHERS.teams if (lambda team: team.anything)(one))
    )


def with_wrapped_team(play):
    return wraps(play)(lambda task, team, env: play(task, OTHERS.of(team), env))


@with_wrapped_team
async def decorated(task, team, env):
    await team.anything(task.prompt)


async def matched(task, team, env):
    reply = team.act("writer")
    match task.source:
        case "direct":
            reply = await reply
            print(reply.text)
        case _:
            reply = await team.act("editor")


async def closes(task, team, env):
    unused = team.act("writer")
    unused.close()
    reply = team.act("writer")
    reply.close()
    reply = await team.act("editor")
    return reply.text


class Office:
    async def play(self, task, team, env):
        await team.act(self.writer)


@pytest.mark.parametrize(
    "orchestra",
    [
        valid,
        later_replies,
        rebound,
        nested,
        decorated,
        matched,
        closes,
        Office().play,
        *ORCHESTRAS.values(),
    ],
)
def test_valid_orchestras_are_not_reported(orchestra: Any) -> None:
    assert describe_misuse(orchestra, Task, TeamSession, Episode) == ""


async def reads_an_attribute(task, team, env):
    for _ in range(2):
        reply = team.act("writer")
        draft = f"{reply.text}!"
        reply = await team.act("editor", draft=draft)


async def reads_it_in_a_condition(task, team, env):
    reply = team.act("writer")
    while reply.value is None:
        reply = await team.act("writer")


async def overwrites(task, team, env):
    reply = team.act("writer")
    reply = await team.act("editor")
    return reply.text


@pytest.mark.parametrize("orchestra", [reads_an_attribute, reads_it_in_a_condition, overwrites])
def test_a_coroutine_in_a_variable_that_is_assigned_again_is_reported(orchestra: Any) -> None:
    misuse = describe_misuse(orchestra, Task, TeamSession, Episode)
    assert misuse == "write await before team.act('writer')"


async def annotates(task, team, env):
    reply: Any = team.act("writer")
    await env.step(reply.text)


def test_a_coroutine_in_a_variable_with_an_annotation_is_reported() -> None:
    misuse = describe_misuse(annotates, Task, TeamSession, Episode)
    assert misuse == "write await before team.act('writer')"
