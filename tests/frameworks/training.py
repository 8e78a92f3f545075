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
PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"
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
        text = self.reply.format(
            a + b if right else random.choice([n for n in range(2, 7) if n != a + b])
        )
        self.said.append((tuple(shown), text))
        span = VersionSpan(version=0, start=0, end=0)
        completion = Completion(token_ids=(), logprobs=(), finish_reason="stop", versions=(span,))
        return PolicyReply(text=text, raw=text, prompt_ids=(), completion=completion)


def shipped_files(framework: Framework, python: Path) -> list[Path]:
    """What a framework ships of its program: in its package, its source distribution or what it writes."""
    places = [
        *python.parents[1].glob("lib/python*/site-packages"),
        *python.parents[1].glob("sources/*/"),
    ]
    return [
        next(path for place in places if (path := place / name).exists())
        for name in framework.shipped
    ]


def digest_of(framework: Framework, python: Path) -> str:
    """SHA-256 of the shipped files, one after the other."""
    return hashlib.sha256(
        b"".join(path.read_bytes() for path in shipped_files(framework, python))
    ).hexdigest()


def program_of(framework: Framework, python: Path, folder: Path) -> tuple[list[Path], Path]:
    """(Where it imports from, what is started): ours, or the shipped program, of a page its only one."""
    shipped = shipped_files(framework, python)
    if framework.ours:
        return [path.parent for path in shipped[:1]], PROGRAMS / framework.ours
    if shipped[0].suffix == ".mdx":
        page = shipped[0].read_text(encoding="utf-8")
        (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        (folder / "program.py").write_text(code, encoding="utf-8")
        return [], folder / "program.py"
    return [Path(str(shipped[0]).removesuffix(framework.shipped[0]))], shipped[0]


@contextmanager
def warm(framework: Framework, python: Path, folder: Path) -> Iterator[tuple[str, ...]]:
    """The command that runs the program in a fork of a process that has imported the framework."""
    place = folder / "warm"
    script, (paths, program) = str(HERE / "warm.py"), program_of(framework, python, folder)
    settings = {
        "PYTHONPATH": ":".join(map(str, paths)),
        "HOME": str(folder),  # some keep files there
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "OTEL_SDK_DISABLED": "true",
        "CREWAI_TESTING": "true",  # it does not ask whether to show its traces
        "CREWAI_STORAGE_DIR": "crewai",
    }
    with (folder / "warm.log").open("w") as log:
        server = subprocess.Popen(
            [python, "-W", "ignore", script, "serve", str(place), framework.apart],
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

    def __init__(self, command: Sequence[str], seed: int, rules: Mapping[str, object]) -> None:
        rules = {"deadline_s": 120.0, "at_once": 4, **rules}
        options = {"command": list(command), "models": {"*": "agent"}, "rules": rules}
        self.orchestra = OrchestraConfig(name="program", options=options).call
        self.env = build_env(EnvConfig(name="math"))
        self.agents = {"agent": AgentConfig(policy="p", role="program_agent", max_tokens=32)}
        self.allocate = build_allocator(RewardConfig(name="shared_outcome"), self.agents)
        self.seed = seed

    def team(self, player: PolicyClient) -> Team:
        """The team on one policy."""
        return build_team(self.agents, {"p": player})

    async def play(self, player: PolicyClient, *, step: int, group_size: int) -> list[Group]:
        """Every sum `group_size` times.

        Raises:
            RuntimeError: a trajectory failed.
        """
        team, make_env, orchestra = self.team(player), self.env, self.orchestra
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


async def learn(lesson: Lesson, model: Path) -> tuple[list[float], list[float], list[float]]:
    """Train on every sum in each step; the share right of each sum before and after, and of each step."""
    trainer = MegatronTrainer(
        TrainerSpec(model=str(model), lr=1e-3, objective=Objective(loss="ppo_clip"))
    )
    engine = LocalEngine(EmbeddedEngine.from_folder(model, max_length=8192, rows=64))
    player = EngineClient(engine=engine, renderer=Renderer(model), max_length=8192)
    rules = dict.fromkeys(lesson.agents, AdvantageConfig(name="grpo"))
    before = right(await lesson.play(player, step=-1, group_size=SCORED))
    curve = []
    for step in range(STEPS):
        groups = await lesson.play(player, step=step, group_size=TRAINED)
        curve.append(fmean(right(groups)))
        samples = weigh(
            add_advantages(to_samples(groups), rules), dict.fromkeys(lesson.agents, 1.0)
        )
        for _ in range(UPDATES):
            trainer.update(pack(samples, 8192))
        await engine.load_weights(trainer.model.weights(), step + 1)
    return before, right(await lesson.play(player, step=STEPS, group_size=SCORED)), curve


def train(name: str, python: Path, folder: Path) -> dict[str, object]:
    """What came of the training of a framework's program: shares right before and after, with the gain's interval."""
    framework = FRAMEWORKS[name]
    began, cpu = time.monotonic(), time.process_time()
    init_process_groups(rank=0, threads=1)
    try:
        with warm(framework, python, folder) as command:
            lesson = Lesson(command, seed=1, rules=framework.rules)
            teacher = Teacher(framework.reply)
            asyncio.run(lesson.play(teacher, step=-2, group_size=TAUGHT))
            said = sorted(teacher.said, key=repr)
            base_model(said, folder / "base")
            cold_start(said, folder / "base", folder / "model", steps=400)
            before, after, curve = asyncio.run(learn(lesson, folder / "model"))
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
        "turns": len(said) / (TAUGHT * len(before)),
    }
