"""Two training steps of a shipped team in one process, with its real prompts, orchestra and rewards.

No parser would accept the replies of a random model. So the first token of a reply selects a phrase:
an even token means the right phrase of the role, and an odd one a well-formed but wrong phrase.
Roles that call tools have more phrases. The sampled tokens themselves are trained, so that a team
that learns gives the right reply more often.
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
from rollout.models.tensors import join_blocks
from rollout.records.trajectory import Message, Sampling, Status, Task
from rollout.sandbox.judge import StdinTest
from rollout.teams.roles import Agent
from tests.support import worlds
from tests.support.play import collect
from tests.support.shipped import TEAMS, Library

STEPS = 2
_MAX_LENGTH = 6144  # tokens; shipped prompts are long, and the tiny tokenizer has few words
_PROGRAM = "print(sum(map(int, input().split())))"
_WRONG_PROGRAM = "print(0)"
_TESTS = [StdinTest(stdin=f"{n} {n}\n", expected=f"{2 * n}\n") for n in (1, 2, 3)]
_TARGET = Target(metric="mae", id_column="id", column="y", truth={"1": "3"})
_CHECK = CheckCall(
    name="t", module="m", function="one", arguments=(), expected=1, passes_before=False
)
_HERE = Path(__file__).resolve().parent
# Problem and answers of a task, by environment
ANSWERS: dict[str, tuple[str, tuple[str, ...]]] = {
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
    "kuhn_poker": ("K Q", ()),
    "data_science": ("Predict y.", (pack_file("test.csv", "id\n1\n"), pack_target(_TARGET))),
    "repository": (
        "one() should be 1.",
        (pack_source("m.py", "def one():\n    return 2\n"), pack_check(_CHECK)),
    ),
    "gymnasium": ("Reach G.", ("1",)),
    "alfworld": ("Do what the task says.", (str(_HERE / "near.tw-pddl"),)),
    "webshop": ("Buy it.", ("2",)),
    "mcp": ("How much is 40 + 2?", ("42",)),
    "openenv": ("Play.", ('{"secret": 1}',)),
    "verifiers": (
        "What is 3+4?",
        (
            json.dumps(
                {
                    "prompt": [{"role": "user", "content": "What is 3+4?"}],
                    "answer": "\\boxed{7}",
                }
            ),
        ),
    ),
}
_MANY_TURN_ENVIRONMENTS = ("gymnasium", "alfworld", "webshop", "mcp")
# With more turns, this team always solves the task, and its agents have nothing to learn.
_FEW_TURN_TEAMS = ("tool_coder",)
# Options of environments that replace shipped ones: small worlds that need no downloads.
WORLDS: dict[str, dict[str, Any]] = {
    "gymnasium": {"make": {"render_mode": "ansi", "is_slippery": False, "desc": ["SG", "FF"]}},
    "mcp": {
        "servers": {
            "plain": {"command": sys.executable, "args": [str(_HERE / "plain_mcp_server.py")]}
        }
    },
    "alfworld": {"config": str(_HERE / "alfworld.yaml")},
    "openenv": {
        "command": [sys.executable, str(_HERE / "openenv_server.py"), "{port}", "8"],
        "sessions": 8,
        "action": {"guess": "{json}"},
        "observation": "{question}",
    },
    "verifiers": {"python": str(_HERE / "stand_in_verifiers" / "python")},
}


def _fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def _tagged(tag: str, right: str, wrong: str) -> tuple[str, str]:
    """Return the right and the wrong phrase, each in a tag."""
    return f"<{tag}>{right}</{tag}>", f"<{tag}>{wrong}</{tag}>"


_BOXED = ("\\boxed{7}", "\\boxed{8}")
_BOXED_BY_PROGRAM = (_fenced("print(7)"), _fenced("print(8)"))
_PROGRAMS = (_fenced(_PROGRAM), _fenced(_WRONG_PROGRAM))
_ANSWERS = _tagged("answer", "Alice", "Bob")
_SEARCHES = _tagged("search", "Alice", "nothing")


def _tool_call(tool: str, **arguments: str) -> str:
    return f"```tool\n{json.dumps({'name': tool, 'arguments': arguments})}\n```"


def _writes_files(*names: str, text: str = "x") -> tuple[str, str]:
    """Return a program that writes files, and one that does not."""
    program = f"for name in {names}: open(name, 'w').write('{text}')"
    return _fenced(program), _fenced("print(1)")


def _edit(line: str) -> str:
    """Return an edit that replaces the function's body."""
    return f"m.py\n<<<<<<< SEARCH\n    return 2\n=======\n    {line}\n>>>>>>> REPLACE"


# Phrases by role, or by "role@environment": the right one, and wrong ones that are well-formed
PHRASES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("chain_generator", "chain_refiner", "reasoner", "debater", "judge", "refine_solver"),
        _BOXED,
    ),
    **dict.fromkeys(
        ("refiner", "finalizer", "chat_solver", "chat_verifier", "proposer", "aggregator"), _BOXED
    ),
    **dict.fromkeys(("self_verifier", "solver"), _BOXED),
    **dict.fromkeys(("tool_user", "chat_coder"), _BOXED_BY_PROGRAM),
    **dict.fromkeys(("coder", "code_writer", "tree_coder"), _PROGRAMS),
    **dict.fromkeys(("answerer", "ask_answerer"), _ANSWERS),
    **dict.fromkeys(("searcher", "ask_searcher", "rewriter"), _SEARCHES),
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
    "data_engineer": _writes_files("X_train.pkl", "y_train.pkl", "X_test.pkl"),
    "modeler": _writes_files("model.pkl"),
    "analyst": _writes_files("submission.csv", text="id,y\\n1,3\\n"),
    "repairer": (_edit("return 1"), _edit("return 3")),
    "tool_caller": (
        _tagged("answer", "42", "")[0],
        '<call>{"tool": "add", "arguments": {"a": 40, "b": 2}}</call>',
    ),
    "world_player@gymnasium": _tagged("action", "right", "down"),
    "world_player@alfworld": _tagged("action", "take apple 1 from fridge 1", "look"),
    "world_player@webshop": _tagged("action", "click[buy now]", "search[more]"),
    "world_player@openenv": _tagged("action", "1", "0"),
    "duelist": ("bet", "pass"),
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
        *_PROGRAMS,
        f"{_tool_call('python', code='n = 0; print(n)')}\n{_fenced(_WRONG_PROGRAM)}",
        _fenced(_WRONG_PROGRAM),
    ),
    "session_reviewer": _tagged("reflection", "read both numbers", "all is well"),
    "lead": (_ANSWERS[0], _tagged("search", "who wrote it", "")[0]),
    "scout": (
        "<evidence>Alice wrote it.</evidence>",
        f"{_tool_call('search', query='Alice')}\n<evidence>Bob wrote it.</evidence>",
    ),
}


def team_config(team: str, sharing: str, model: str, results: Path) -> RunConfig:
    """Return the configuration of a shipped team on `model`, with the policies of `sharing`."""
    values = TEAMS[team]
    settings = [
        "~experiment",
        "seed=2",  # with this seed, every policy has replies to learn from
        f"team={team}",
        "+run=lesson",
        f"results={results}",
        "+data={generator: arithmetic, train: 1, validation: 1, test: 1}",
        f"sharing={sharing}",
        f"policy_defaults={{model: {model}, lr: 1e-2}}",
        # At a low temperature a random model would repeat the last token of its prompt.
        *(f"+agents.{agent}={{max_tokens: 3, temperature: 20.0}}" for agent in values["agents"]),
        "+trainer={steps: 2, tasks_per_step: 2, group_size: 4}",
        "+evaluation={}",
        "retriever={}",  # for teams that search
    ]
    has_many_turns = values.get("env", {}).get("name") in _MANY_TURN_ENVIRONMENTS
    if has_many_turns or team in _FEW_TURN_TEAMS:
        settings.append("orchestra.options.max_turns=2")
    if team == "ab_mcts":
        settings.append("orchestra.options.max_nodes=4")
    return RunConfig.from_values(resolve(settings), team)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Client whose replies are replaced by phrases, selected by the first token of the reply.

    The last line of the system prompt names the phrases; see `add_phrase_name`.
    """

    player: EngineClient

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        reply = await self.player.say(messages, sampling, chat)
        phrases = PHRASES[messages[0].content.splitlines()[-1]]
        text = phrases[reply.completion.token_ids[0] % len(phrases)]
        # The phrase is complete, although the reply is usually cut at the token limit.
        completion = replace(reply.completion, finish_reason="stop")
        return replace(reply, text=text, raw=text, completion=completion)


def add_phrase_name(agent: Agent, env: str) -> Agent:
    """Return the agent with the name of its phrases as the last line of its system prompt."""
    role = agent.role
    name = f"{role.name}@{env}"
    if name not in PHRASES:
        name = role.name
    assert all(role.parse(phrase) is not None for phrase in PHRASES[name]), name
    return replace(agent, role=replace(role, system=f"{role.system}\n{name}"))


@dataclass
class KillingRetriever:
    """Retriever that kills one of its servers during a search.

    Attributes:
        pid: process id of the server.
        searches_left: number of searches up to and including the one that is disturbed.
    """

    client: RetrievalClient
    pid: int
    searches_left: int

    async def search(self, query: str, k: int) -> Sequence[Passage]:
        self.searches_left -= 1
        kills = self.searches_left == 0
        search = asyncio.ensure_future(self.client.search(query, k))
        await asyncio.sleep(0)  # lets the search start
        if kills:
            os.kill(self.pid, signal.SIGKILL)
        return await search


def teach(
    rank: int,
    out: Path,
    team: str,
    sharing: str,
    model: str,
    urls: Sequence[str] = (),
    killed_pid: int = 0,
    killed_at: int = 0,
) -> None:
    """Train `team` for two steps, and write the results to `out`/{team}_{sharing}.json.

    Args:
        urls: retrieval servers to search; () for a retriever in this process.
        killed_pid: process id of the server that is killed.
        killed_at: number of the search during which it is killed, from 1.
    """
    worlds.install()
    config = team_config(team, sharing, model, out)
    retriever: Retriever = Library()
    if urls:
        retriever = KillingRetriever(RetrievalClient(*urls), killed_pid, killed_at)
    results = asyncio.run(_train_team(config, model, retriever))
    (out / f"{team}_{sharing}.json").write_text(json.dumps(results))


async def _train_team(config: RunConfig, model: str, retriever: Retriever) -> list[dict[str, Any]]:
    spec = TrainerSpec(model=model, lr=1e-2, objective=Objective(loss="ppo_clip"))
    trainers = {policy: MegatronTrainer(spec) for policy in config.policies}
    engines = {
        policy: LocalEngine(EmbeddedEngine.from_folder(model, max_length=_MAX_LENGTH, rows=16))
        for policy in config.policies
    }
    renderer = Renderer(model)
    players = {
        policy: Interpreter(player=EngineClient(engine=engine, renderer=renderer))
        for policy, engine in engines.items()
    }
    team = build_team(config.agents, players)  # type: ignore[arg-type]
    agents = {name: add_phrase_name(agent, config.env.name) for name, agent in team.agents.items()}
    team = replace(team, agents=agents)
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
    results = []
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
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        failed = [
            trajectory.error for trajectory in trajectories if trajectory.status is Status.FAILED
        ]
        samples = add_advantages(
            to_samples([allocate(group) for group in groups]),
            dict.fromkeys(config.agents, config.advantage),
        )
        updates = {}
        for policy, trainer in trainers.items():
            policy_samples = [sample for sample in samples if sample.policy == policy]
            if policy_samples:  # the policy's agents had turns in this step
                updates[policy] = _update(config, trainer, policy_samples)
                await engines[policy].load_weights(trainer.model.weights(), step + 1)
        results.append(
            {
                "policies": list(trainers),
                "failed": failed,
                "speakers": [
                    [turn.agent for turn in trajectory.turns] for trajectory in trajectories
                ],
                "rewards_finite": all(math.isfinite(sample.reward) for sample in samples),
                "updates": updates,
            }
        )
    return results


def _update(
    config: RunConfig, trainer: MegatronTrainer, samples: Sequence[Sample]
) -> dict[str, float]:
    """Train on the samples.

    Returns:
        `gap`: largest difference of log-probabilities between engine and trainer. `change`: largest
        change of a weight. `grad_norm`: norm of the gradients. `signal`: largest advantage.
    """
    weights = dict.fromkeys(config.agents, 1.0)
    samples = weigh(samples, weights, config.loss.aggregation, config.loss.norm)
    batches = pack(samples, 4096)
    trainer_logprobs = unpack(batches, trainer.score(batches), samples)
    gaps = []
    for sample, row in zip(samples, trainer_logprobs, strict=True):
        gaps += [abs(ours - theirs) for ours, theirs in zip(row, sample.behaviour, strict=True)]

    before = {name: join_blocks(blocks).clone() for name, blocks in trainer.model.weights()}
    metrics = trainer.update(batches)
    changes = [
        float((join_blocks(blocks) - before[name]).abs().max())
        for name, blocks in trainer.model.weights()
    ]
    advantages = [advantage for sample in samples for advantage in sample.advantages or (0.0,)]
    return {
        "gap": max(gaps),
        "change": max(changes),
        "grad_norm": metrics["grad_norm"],
        "signal": max(map(abs, advantages)),
    }
