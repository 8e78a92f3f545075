"""One framework's program trained on sums: a careless teacher, supervised steps on what it said, then rewards.

The program is played as it is by the orchestra `program`, through the gateway. A teacher answers its calls first, right
in a share of them; a tiny random model learns to imitate that, and reinforcement learning does the rest.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean

from mcore_mas.config.cold_start import BaseModelConfig
from mcore_mas.config.credit import AdvantageConfig
from mcore_mas.credit.assign import add_advantages
from mcore_mas.credit.samples import Sample, to_samples, weigh
from mcore_mas.equations.losses import Objective
from mcore_mas.equations.statistics import mean_interval
from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from mcore_mas.pipeline.base_model import init_model, train_tokenizer
from rollout.config.agents import AgentConfig, build_team
from rollout.config.environment import EnvConfig, build_env
from rollout.config.orchestra import OrchestraConfig
from rollout.config.reward import RewardConfig, build_allocator
from rollout.engines import ChatState, EngineClient, PolicyClient, PolicyReply
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.models.chat_template import Renderer
from rollout.models.tool_calls import write_tools_as_text
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import (
    Completion,
    Group,
    Message,
    Sampling,
    Task,
    Trajectory,
    VersionSpan,
)
from rollout.teams.collect import Collector
from rollout.teams.team import Team

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAMS = HERE / "programs"  # ours
# Frameworks that need different versions of one package have environments of their own; each is
# made of the requirements file of its number.
ENVIRONMENTS = {"frameworks": ".venv-frameworks", "frameworks-2": ".venv-frameworks-2"}
NUMBERS = range(1, 4)
RIGHT = 0.35  # share of the teacher's replies
TAUGHT, TRAINED, SCORED = (
    16,
    4,
    16,
)  # trajectories of each sum: before the cold start, in a step, in an evaluation
STEPS, UPDATES = 16, 4  # of reinforcement learning; of the model in each
_NEAR = 64  # tokens before a reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework, its program, what of it is shipped, and how a reply to it reads."""

    package: str  # in the index
    shipped: tuple[
        str, ...
    ] = ()  # files of the package, its source distribution or what it writes; the program first
    ours: str = (
        ""  # in tests/frameworks/programs: the program, or what hands a shipped team its task
    )
    arguments: tuple[str, ...] = ()
    reply: str = "\\boxed{{{0}}}"
    apart: str = ""  # of the package, what starts threads when it is imported (see `warm.py`)
    rules: Mapping[str, object] = field(default_factory=dict)  # of the orchestra `program`
    requirements: str = "frameworks"  # file in requirements/
    # reply of each agent by its name; the program asks for it under this name
    replies: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """Python of the framework's environment."""
        return ROOT / ENVIRONMENTS[self.requirements] / "bin" / "python"

    @property
    def agents(self) -> dict[str, str]:
        """Replies by agent; a program without names of its own has one agent."""
        return dict(self.replies) or {"agent": self.reply}


FRAMEWORKS = {
    "AG2": Framework(
        package="ag2", shipped=("website/snippets/python-examples/conversableagentchat.mdx",)
    ),
    "CrewAI": Framework(
        package="crewai",
        shipped=tuple(
            f"src/sums/{name}" for name in ("crew.py", "config/agents.yaml", "config/tasks.yaml")
        ),
        ours="ask_crew.py",
        reply="I now can give a great answer\nFinal Answer: \\boxed{{{0}}}",
        apart="crewai",
    ),
    "smolagents": Framework(
        package="smolagents",
        shipped=("smolagents/cli.py",),
        arguments=(
            *("{TASK}", "--tools", "--model-type", "OpenAIModel", "--model-id", "gpt-4o-mini"),
            *("--api-base", "{OPENAI_BASE_URL}", "--api-key", "{OPENAI_API_KEY}"),
        ),
        reply="Thought: I add.\n<code>\nfinal_answer('\\\\boxed{{{0}}}')\n</code>",
        rules={"most_calls": 4, "crash": "wrong"},  # it makes up to 20
    ),
    "OpenAI Agents SDK": Framework(
        package="openai-agents", shipped=("examples/agent_patterns/parallelization.py",)
    ),
    "Anthropic SDK": Framework(package="anthropic", shipped=("examples/memory/basic.py",)),
    "LangGraph": Framework(
        package="langgraph",
        shipped=("examples/graph_prerelease_reqs/agent.py",),
        ours="ask_graph.py",
    ),
    "pydantic-ai": Framework(
        package="pydantic-ai-slim",
        ours="sum_pydantic_ai.py",
        requirements="frameworks-2",
        reply='```tool\n{{"name": "final_result", "arguments": {{"value": {0}}}}}\n```',
        rules={"most_calls": 4},  # it asks again after a malformed output
    ),
    "LlamaIndex": Framework(
        package="llama-index-core", ours="sum_llamaindex.py", requirements="frameworks-2"
    ),
    "DSPy": Framework(
        package="dspy",
        ours="sum_dspy.py",
        apart="dspy",  # it reads the folder of its cache when it is imported
        requirements="frameworks-2",
        reply="[[ ## reasoning ## ]]\nI add.\n\n[[ ## answer ## ]]\n{0}\n\n[[ ## completed ## ]]",
        rules={"most_calls": 4},  # it asks again, for JSON, after a malformed reply
    ),
    "Microsoft Agent Framework": Framework(
        package="agent-framework-core",
        ours="sum_agent_framework.py",
        requirements="frameworks-2",
    ),
    "two policies": Framework(
        package="openai",
        ours="plan_and_work.py",
        requirements="frameworks-2",
        replies={"planner": "What is {a}+{b}?", "worker": "\\boxed{{{0}}}"},
    ),
}


def sums() -> list[Task]:
    """Every sum of two numbers."""
    return [
        Task(
            id=f"{a}+{b}",
            prompt=f"What is {a}+{b}?",
            answers=(str(a + b),),
            env="math",
            source="sums",
            split="train",
        )
        for a, b in itertools.product(NUMBERS, NUMBERS)
    ]


@dataclass(slots=True)
class Teacher:
    """A policy that is often wrong, and keeps what it was asked and said.

    What it says to the same words, all in all, does not depend on which program comes first.
    """

    reply: str
    said: list[tuple[tuple[Message, ...], str]] = field(default_factory=list)
    times: Counter[str] = field(default_factory=Counter)  # that it was asked so

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        shown = write_tools_as_text(messages, chat.tools if chat else ())
        sums = re.findall(r"What is (\d)\+(\d)\?", "\n".join(message.content for message in shown))
        a, b = map(int, sums[-1] if sums else (0, 0))
        words = repr(shown)
        self.times[words] += 1
        random = Random(f"{words}{self.times[words]}")
        right = random.random() < RIGHT
        answer = a + b if right else random.choice([n for n in range(2, 7) if n != a + b])
        text = self.reply.format(answer, a=a, b=answer - a)
        self.said.append((tuple(shown), text))
        span = VersionSpan(version=0, start=0, end=0)
        completion = Completion(token_ids=(), logprobs=(), finish_reason="stop", versions=(span,))
        return PolicyReply(text=text, raw=text, prompt_ids=(), completion=completion)


def shipped_files(framework: Framework) -> list[Path]:
    """What a framework ships of its program: in its package, its source distribution or what it writes."""
    environment = framework.python.parents[1]
    places = [
        *environment.glob("lib/python*/site-packages"),
        *environment.glob("sources/*/"),
    ]
    return [
        next(path for place in places if (path := place / name).exists())
        for name in framework.shipped
    ]


def digest_of(framework: Framework) -> str:
    """SHA-256 of the shipped files, one after the other."""
    return hashlib.sha256(
        b"".join(path.read_bytes() for path in shipped_files(framework))
    ).hexdigest()


def program_of(framework: Framework, folder: Path) -> tuple[list[Path], Path]:
    """(Where it imports from, what is started): ours, or the shipped program, of a page its only one."""
    shipped = shipped_files(framework)
    if framework.ours:
        return [path.parent for path in shipped[:1]], PROGRAMS / framework.ours
    if shipped[0].suffix == ".mdx":
        page = shipped[0].read_text(encoding="utf-8")
        (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        (folder / "program.py").write_text(code, encoding="utf-8")
        return [], folder / "program.py"
    return [Path(str(shipped[0]).removesuffix(framework.shipped[0]))], shipped[0]


@contextmanager
def warm(framework: Framework, folder: Path) -> Iterator[tuple[str, ...]]:
    """The command that runs the program in a fork of a process that has imported the framework."""
    place = folder / "warm"
    script, (paths, program) = str(HERE / "warm.py"), program_of(framework, folder)
    settings = {
        "PYTHONPATH": ":".join(map(str, paths)),
        "HOME": str(folder),  # some keep files there
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "OTEL_SDK_DISABLED": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else every start asks the network for prices
        "CREWAI_TESTING": "true",  # it does not ask whether to show its traces
        "CREWAI_STORAGE_DIR": "crewai",
    }
    with (folder / "warm.log").open("w") as log:
        server = subprocess.Popen(
            [framework.python, "-W", "ignore", script, "serve", str(place), framework.apart],
            env=os.environ | settings,
            cwd=folder,  # where programs write
            stdout=log,
            stderr=log,
        )
        try:
            while not place.exists():
                if server.poll() is not None:
                    raise RuntimeError((folder / "warm.log").read_text())
                time.sleep(0.05)
            named = [f"{name}={value}" for name, value in settings.items()]
            yield (
                "env",
                *named,
                sys.executable,
                "-I",
                "-S",
                script,
                "ask",
                str(place),
                str(program),
                *framework.arguments,
            )
        finally:
            server.terminate()
            server.wait()


class Lesson:
    """A program with its team, its environment and its rewards."""

    def __init__(self, command: Sequence[str], seed: int, framework: Framework) -> None:
        rules = {"deadline_s": 120.0, "at_once": 4, **framework.rules}
        models = {"*": next(iter(framework.agents))}
        options = {"command": list(command), "models": models, "rules": rules}
        self.orchestra = OrchestraConfig(name="program", options=options).call
        self.env = build_env(EnvConfig(name="math"))
        self.agents = {
            name: AgentConfig(policy=name, role="program_agent", max_tokens=32)
            for name in framework.agents
        }
        self.allocate = build_allocator(RewardConfig(name="shared_outcome"), self.agents)
        self.seed = seed

    def team(self, players: Mapping[str, PolicyClient]) -> Team:
        """The team, in which each agent has a policy of its name."""
        return build_team(self.agents, players)

    async def play(
        self, players: Mapping[str, PolicyClient], *, step: int, group_size: int
    ) -> list[Group]:
        """Every sum `group_size` times.

        Raises:
            RuntimeError: a trajectory failed.
        """
        team, make_env, orchestra = self.team(players), self.env, self.orchestra
        collector = Collector(
            team=team, make_env=make_env, orchestra=orchestra, seed=self.seed, step=step
        )
        groups = await collector.collect(sums(), group_size)
        failed = [t.error for group in groups for t in group.trajectories if t.error]
        if failed:
            raise RuntimeError(f"{len(failed)} trajectories failed; the first: {failed[0]}")
        return [self.allocate(group) for group in groups]


def right(groups: Sequence[Group]) -> list[float]:
    """The share of each task's trajectories that were right."""
    return [fmean(succeeded(t) for t in group.trajectories) for group in groups]


def succeeded(trajectory: Trajectory) -> float:
    """Whether its answer was right."""
    return float(trajectory.outcome or 0.0)


def base_model(said: Sequence[tuple[tuple[Message, ...], str]], folder: Path) -> None:
    """A tokenizer of what was said, and random weights."""
    base = BaseModelConfig(
        layers=2, hidden=64, heads=4, kv_heads=4, ffn=192, vocab=1024, positions=8192
    )
    texts = (
        text
        for asked, reply in said
        for text in (*(f"{m.role}\n{m.content}" for m in asked), reply)
    )
    tokenizer = train_tokenizer(texts, base.vocab, "phrases")
    tokenizer.save_pretrained(str(folder))
    init_model(tokenizer, base, derive_seed(1, "framework") % 2**63).save_pretrained(str(folder))


def cold_start(
    said: Sequence[tuple[tuple[Message, ...], str]], folder: Path, out: Path, *, steps: int
) -> None:
    """Supervised steps on what the teacher said, first with the end of each prompt only.

    A small model finds a sum among 60 tokens, and then keeps its eyes on that place; among a framework's 2,000 it never
    does.
    """
    spec = TrainerSpec(
        model=str(folder), lr=2e-3, warmup_steps=20, objective=Objective(loss="cross_entropy")
    )
    trainer, renderer = MegatronTrainer(spec), Renderer(folder)
    random = Random(1)
    for step in range(steps):
        batch = []
        for asked, reply in random.sample(list(said), 32):
            prompt, completion = renderer.render(asked), renderer.encode_reply(reply)
            prompt = prompt[-_NEAR:] if step < steps // 2 else prompt
            ids, trained = prompt + completion, (False,) * len(prompt) + (True,) * len(completion)
            batch.append(_supervised(ids, trained))
        trainer.update(pack(weigh(batch, {"p": 1.0}), 8192))
    trainer.model.write(out)


def _supervised(ids: tuple[int, ...], trained: tuple[bool, ...]) -> Sample:
    return Sample(
        policy="p",
        agent="p",
        task="",
        trajectory="",
        turn=0,
        prompt_ids=(),
        completion_ids=ids,
        trained=trained,
    )


async def learn(
    lesson: Lesson, models: Mapping[str, Path]
) -> tuple[list[float], list[float], list[float]]:
    """Train on every sum in each step; the share right of each sum before and after, and of each step.

    Several agents are policies of their own, and each agent's rewards are normalised among its own turns.
    """
    objective = Objective(loss="ppo_clip")
    trainers = {
        name: MegatronTrainer(TrainerSpec(model=str(model), lr=1e-3, objective=objective))
        for name, model in models.items()
    }
    engines = {
        name: LocalEngine(EmbeddedEngine.from_folder(model, max_length=8192, rows=64))
        for name, model in models.items()
    }
    players = {
        name: EngineClient(engine=engines[name], renderer=Renderer(model), max_length=8192)
        for name, model in models.items()
    }
    estimator = AdvantageConfig(name="grpo" if len(models) == 1 else "drmas")
    rules = dict.fromkeys(lesson.agents, estimator)
    before = right(await lesson.play(players, step=-1, group_size=SCORED))
    curve = []
    for step in range(STEPS):
        groups = await lesson.play(players, step=step, group_size=TRAINED)
        curve.append(fmean(right(groups)))
        samples = add_advantages(to_samples(groups), rules)
        for name, trainer in trainers.items():
            policy_samples = [sample for sample in samples if sample.policy == name]
            batch = weigh(policy_samples, {name: 1.0})
            for _ in range(UPDATES):
                trainer.update(pack(batch, 8192))
            await engines[name].load_weights(trainer.model.weights(), step + 1)
    return before, right(await lesson.play(players, step=STEPS, group_size=SCORED)), curve


def train(name: str, folder: Path) -> dict[str, object]:
    """Train a framework's program; return the shares of right answers before and after, and the gain's interval."""
    framework = FRAMEWORKS[name]
    began, cpu = time.monotonic(), time.process_time()
    init_process_groups(rank=0, threads=1)
    try:
        with warm(framework, folder) as command:
            lesson = Lesson(command, seed=1, framework=framework)
            teachers = {agent: Teacher(reply) for agent, reply in framework.agents.items()}
            asyncio.run(lesson.play(teachers, step=-2, group_size=TAUGHT))
            turns = sum(len(teacher.said) for teacher in teachers.values())
            models = {}
            for agent, teacher in teachers.items():
                demonstrations = sorted(teacher.said, key=repr)
                base = folder / f"base-{agent}"
                models[agent] = folder / f"model-{agent}"
                base_model(demonstrations, base)
                cold_start(demonstrations, base, models[agent], steps=400)
            before, after, curve = asyncio.run(learn(lesson, models))
    finally:
        destroy_process_groups()
    gains = [b - a for a, b in zip(before, after, strict=True)]
    low, high = mean_interval(gains, name)
    return {
        "before": fmean(before),
        "after": fmean(after),
        "steps": STEPS,
        "low": low,
        "high": high,
        "curve": curve,
        "minutes": (time.monotonic() - began) / 60,
        "cpu_minutes": (time.process_time() - cpu) / 60,
        "turns": turns / (TAUGHT * len(before)),
    }
