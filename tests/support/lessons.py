"""Two training steps of a shipped team in one process: its own prompts, orchestra, environment, rewards and credit.

A random model says nothing that a parser would take, so its replies are read by their first token: an even one means
what the role ought to say, an odd one something that is well-formed and wrong; who calls tools has more to
say. The tokens stay the model's own, and a team that learns says the right thing more often.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.credit.assign import add_advantages
from mcore_mas.credit.samples import Sample, to_samples, weigh
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack, unpack
from retrieval.client import Passage, RetrievalClient
from rollout.config.agents import build_team
from rollout.config.environment import EnvConfig, build_env
from rollout.config.reward import build_allocator
from rollout.engines import ChatState, EngineClient, PolicyReply
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.environments.code import pack_solution, pack_test
from rollout.environments.data_science import pack_file, pack_target
from rollout.environments.predictions import Target
from rollout.environments.repository import CheckCall, pack_check, pack_source
from rollout.environments.search import Retriever
from rollout.models.chat_template import Renderer
from rollout.models.tensors import whole
from rollout.records.trajectory import Message, Sampling, Status, Task
from rollout.sandbox.judge import StdinTest
from rollout.teams.roles import Agent
from tests.support import worlds
from tests.support.play import collect
from tests.support.shipped import TEAMS, Library

STEPS = 2
_MAX_LENGTH = 6144  # tokens; shipped prompts are long, and the tiny tokenizer has few words
_PROGRAM, _BROKEN = "print(sum(map(int, input().split())))", "print(0)"
_TESTS = [StdinTest(stdin=f"{n} {n}\n", expected=f"{2 * n}\n") for n in (1, 2, 3)]
_TARGET = Target(metric="mae", id_column="id", column="y", truth={"1": "3"})
_CHECK = CheckCall(name="t", module="m", function="one", arguments=(), expected=1, passes=False)
_HERE = Path(__file__).resolve().parent
ANSWERS: dict[
    str, tuple[str, tuple[str, ...]]
] = {  # by environment: a problem, and what its tasks keep
    "math": ("What is 3+4?", ("7",)),
    "search": ("Who wrote it?", ("Alice",)),
    "code": (
        "Read two integers and print their sum.",
        (
            *(pack_test(test, visible=i == 0) for i, test in enumerate(_TESTS)),
            pack_solution(_PROGRAM),
        ),
    ),
    "plan_path": ("S 1 1 G 1 3\nS . G\n. . .", ()),
    "data_science": ("Predict y.", (pack_file("test.csv", "id\n1\n"), pack_target(_TARGET))),
    "repository": (
        "one() should be 1.",
        (pack_source("m.py", "def one():\n    return 2\n"), pack_check(_CHECK)),
    ),
    "gymnasium": ("Reach G.", ("1",)),
    "alfworld": ("Do what the task says.", (str(_HERE / "near.tw-pddl"),)),
    "webshop": ("Buy it.", ("2",)),
    "mcp": ("How much is 40 + 2?", ("42",)),
}
_PATIENT = ("gymnasium", "alfworld", "webshop", "mcp")  # whose teams have many turns
_SHORT = (
    "tool_coder",
)  # which solves the lesson in more turns, so that nobody has anything to learn
WORLDS: dict[
    str, dict[str, Any]
] = {  # by environment: options in place of the shipped ones, for what is small and here
    "gymnasium": {"make": {"render_mode": "ansi", "is_slippery": False, "desc": ["SG", "FF"]}},
    "mcp": {
        "servers": {
            "plain": {"command": sys.executable, "args": [str(_HERE / "plain_mcp_server.py")]}
        }
    },
    "alfworld": {"config": str(_HERE / "alfworld.yaml")},
}


def _fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def _tagged(tag: str, right: str, wrong: str) -> tuple[str, str]:
    return f"<{tag}>{right}</{tag}>", f"<{tag}>{wrong}</{tag}>"


_BOXED = ("\\boxed{7}", "\\boxed{8}")
_COMPUTED = (_fenced("print(7)"), _fenced("print(8)"))
_WRITTEN = (_fenced(_PROGRAM), _fenced(_BROKEN))
_ANSWERED = _tagged("answer", "Alice", "Bob")
_SEARCHED = _tagged("search", "Alice", "nothing")
_LEFT = "for name in {names}: open(name, 'w').write('{text}')"


def _called(tool: str, **arguments: str) -> str:
    return f"```tool\n{json.dumps({'name': tool, 'arguments': arguments})}\n```"


def _leaves(*names: str, text: str = "x") -> tuple[str, str]:
    return _fenced(_LEFT.format(names=names, text=text)), _fenced("print(1)")


def _replaced(line: str) -> str:
    return f"m.py\n<<<<<<< SEARCH\n    return 2\n=======\n    {line}\n>>>>>>> REPLACE"


SAYS: dict[
    str, tuple[str, ...]
] = {  # by role, and its environment where that matters: what is right, and what is well-formed and wrong
    **dict.fromkeys(
        ("chain_generator", "chain_refiner", "reasoner", "debater", "judge", "refine_solver"),
        _BOXED,
    ),
    **dict.fromkeys(
        ("refiner", "finalizer", "chat_solver", "chat_verifier", "proposer", "aggregator"), _BOXED
    ),
    **dict.fromkeys(("self_verifier", "solver"), _BOXED),
    **dict.fromkeys(("tool_user", "chat_coder"), _COMPUTED),
    **dict.fromkeys(("coder", "code_writer", "tree_coder"), _WRITTEN),
    **dict.fromkeys(("answerer", "ask_answerer"), _ANSWERED),
    **dict.fromkeys(("searcher", "ask_searcher", "rewriter"), _SEARCHED),
    **dict.fromkeys(
        ("extractor", "ask_summariser"), _tagged("evidence", "Alice wrote it.", "Bob wrote it.")
    ),
    "chain_verifier": ("\\boxed{1}", "\\boxed{0}"),
    "tester": (
        "<input>\n1 2\n</input>\n<output>\n3\n</output>",
        "<input>\n1 2\n</input>\n<output>\n4\n</output>",
    ),
    "code_planner": _tagged("pseudocode", "add them", "print zero"),
    "reflector": _tagged("reflection", "read both numbers", "all is well"),
    "game_tool": ("**Actions List**: R R", "**Actions List**: D"),
    "game_coder": (
        _fenced("print('**Actions List**: R R')"),
        _fenced("print('**Actions List**: D')"),
    ),
    "data_engineer": _leaves("X_train.pkl", "y_train.pkl", "X_test.pkl"),
    "modeler": _leaves("model.pkl"),
    "analyst": _leaves("submission.csv", text="id,y\\n1,3\\n"),
    "repairer": (_replaced("return 1"), _replaced("return 3")),
    "tool_caller": (
        _tagged("answer", "42", "")[0],
        '<call>{"tool": "add", "arguments": {"a": 40, "b": 2}}</call>',
    ),
    "world_player@gymnasium": _tagged("action", "right", "down"),
    "world_player@alfworld": _tagged("action", "take apple 1 from fridge 1", "look"),
    "world_player@webshop": _tagged("action", "click[buy now]", "search[more]"),
    "game_planner": ("#### R R", "#### D"),
    "player": ("#### R R", "#### D"),
    "search_verifier": _tagged("verify", "yes", "no"),
    "ask_planner": (
        "<plan>\nWho wrote it? | Alice\n</plan>\n<answer>Alice</answer>",
        "<plan>\nWho wrote it? | Bob\n</plan>\n<answer>Bob</answer>",
    ),
    "ask_updater": _tagged("update", "t1 | Alice", "t1 | Bob"),
    "refine_verifier": (
        "<status>correct</status><feedback>it holds</feedback>",
        "<status>incorrect</status><feedback>add again</feedback>",
    ),
    "decomposer": _tagged("queries", "Alice", "nothing"),
    "program_agent": _BOXED,
    "selector": _tagged("select", "1", "none"),
    "verifier": _tagged("verify", "approve", "reject"),
    "session_coder": (
        *_WRITTEN,
        f"{_called('python', code='n = 0; print(n)')}\n{_fenced(_BROKEN)}",
        _fenced(_BROKEN),
    ),
    "session_reviewer": _tagged("reflection", "read both numbers", "all is well"),
    "lead": (_ANSWERED[0], _tagged("search", "who wrote it", "")[0]),
    "scout": (
        "<evidence>Alice wrote it.</evidence>",
        f"{_called('search', query='Alice')}\n<evidence>Bob wrote it.</evidence>",
    ),
}


def team_config(team: str, sharing: str, model: str, results: Path) -> RunConfig:
    """The shipped team on `model`, with the policies of `sharing`."""
    values = TEAMS[team]
    settings = [
        "~experiment",
        "seed=2",  # under which every policy has something to learn from
        f"team={team}",
        "+run=lesson",
        f"results={results}",
        "+data={generator: arithmetic, train: 1, validation: 1, test: 1}",
        f"sharing={sharing}",
        f"policy_defaults={{model: {model}, lr: 1e-2}}",
        # hot enough that a random model, which repeats the last token, says one thing as often as another
        *(f"+agents.{agent}={{max_tokens: 3, temperature: 20.0}}" for agent in values["agents"]),
        "+trainer={steps: 2, tasks_per_step: 2, group_size: 4}",
        "+evaluation={}",
        "retriever={}",  # of teams that search
        *(
            ["orchestra.options.max_turns=2"]
            if values.get("env", {}).get("name") in _PATIENT or team in _SHORT
            else []
        ),
        *(["orchestra.options.max_nodes=4"] if team == "ab_mcts" else []),
    ]
    return RunConfig.check(resolve(settings), team)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A player whose replies are read by their first token."""

    player: EngineClient

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        said = await self.player.say(messages, sampling, chat)
        phrases = SAYS[messages[0].content.splitlines()[-1]]
        text = phrases[said.completion.token_ids[0] % len(phrases)]
        return replace(
            said, text=text, raw=text, completion=replace(said.completion, finish_reason="stop")
        )  # not cut short


def introduced(agent: Agent, env: str) -> Agent:
    """The agent with its role's name as the last line of its system prompt, where the interpreter looks."""
    role = agent.role
    name = f"{role.name}@{env}" if f"{role.name}@{env}" in SAYS else role.name
    assert all(role.parse(phrase) is not None for phrase in SAYS[name]), name
    return replace(agent, role=replace(role, system=f"{role.system}\n{name}"))


@dataclass
class Bereaved:
    """A retriever of several servers, one of which is killed while it answers the last of `left` searches."""

    client: RetrievalClient
    pid: int
    left: int

    async def search(self, query: str, k: int) -> Sequence[Passage]:
        self.left -= 1
        last, asked = self.left == 0, asyncio.ensure_future(self.client.search(query, k))
        await asyncio.sleep(0)
        if last:
            os.kill(self.pid, signal.SIGKILL)
        return await asked


def teach(
    rank: int,
    out: Path,
    team: str,
    sharing: str,
    model: str,
    urls: Sequence[str] = (),
    dying: int = 0,
    at: int = 0,
) -> None:
    """Play and train `team` for two steps; writes what came of it to `out`/{team}_{sharing}.json.

    With `urls` these retrieval servers are asked, of which the process `dying` is killed in search `at`.
    """
    worlds.install()
    config = team_config(team, sharing, model, out)
    retriever = Bereaved(RetrievalClient(*urls), dying, at) if urls else Library()
    lessons = asyncio.run(_teach(config, model, retriever))
    (out / f"{team}_{sharing}.json").write_text(json.dumps(lessons))


async def _teach(config: RunConfig, model: str, retriever: Retriever) -> list[dict[str, Any]]:
    spec = TrainerSpec(model=model, lr=1e-2, objective=Objective(loss="ppo_clip"))
    trainers = {policy: MegatronTrainer(spec) for policy in config.policies}
    engines = {
        policy: LocalEngine(EmbeddedEngine.from_folder(model, max_length=_MAX_LENGTH, rows=16))
        for policy in config.policies
    }
    renderer = Renderer(model)
    voices = {
        p: Interpreter(player=EngineClient(engine=e, renderer=renderer)) for p, e in engines.items()
    }
    team = build_team(config.agents, voices)  # type: ignore[arg-type]
    team = replace(
        team,
        agents={name: introduced(agent, config.env.name) for name, agent in team.agents.items()},
    )
    tools = {"retriever": retriever} if config.env.name == "search" else {}
    env = EnvConfig(
        name=config.env.name, options={**config.env.options, **WORLDS.get(config.env.name, {})}
    )
    prompt, answers = ANSWERS[config.env.name]
    tasks = [
        Task(
            id=name,
            prompt=prompt,
            answers=answers,
            env=config.env.name,
            source="lesson",
            split="train",
        )
        for name in ("one", "two")
    ]
    allocate = build_allocator(config.reward, config.agents)
    lessons = []
    for step in range(STEPS):
        groups = await collect(
            tasks,
            team,
            build_env(env, **tools),
            config.orchestra.call,
            group_size=config.trainer.group_size,
            seed=config.seed,
            step=step,
        )
        failed = [
            t.error for group in groups for t in group.trajectories if t.status is Status.FAILED
        ]
        samples = add_advantages(
            to_samples([allocate(group) for group in groups]),
            dict.fromkeys(config.agents, config.advantage),
        )
        updates = {}
        for policy, trainer in trainers.items():
            own = [sample for sample in samples if sample.policy == policy]
            if own:  # its agents were asked in this step
                updates[policy] = _update(config, trainer, own)
                await engines[policy].load_weights(trainer.model.weights(), step + 1)
        lessons.append(
            {
                "failed": failed,
                "lines": [
                    [turn.agent for turn in t.turns] for group in groups for t in group.trajectories
                ],
                "rewards_finite": all(math.isfinite(sample.reward) for sample in samples),
                "updates": updates,
            }
        )
    return lessons


def _update(
    config: RunConfig, trainer: MegatronTrainer, samples: Sequence[Sample]
) -> dict[str, float]:
    """Train on the samples; how far engine and trainer were apart, and how much the weights changed."""
    weights = dict.fromkeys(config.agents, 1.0)
    samples = weigh(samples, weights, config.loss.aggregation, config.loss.norm)
    batches = pack(samples, 4096)
    seen = unpack(batches, trainer.score(batches), samples)
    before = {name: whole(rows).clone() for name, rows in trainer.model.weights()}
    metrics = trainer.update(batches)
    return {
        "gap": max(
            abs(a - b)
            for sample, row in zip(samples, seen, strict=True)
            for a, b in zip(sample.behaviour, row, strict=True)
        ),
        "change": max(
            float((whole(rows) - before[name]).abs().max())
            for name, rows in trainer.model.weights()
        ),
        "grad_norm": metrics["grad_norm"],
        "signal": max(abs(a) for sample in samples for a in sample.advantages or (0.0,)),
    }
