"""Training of an agent framework's program on sums: demonstrations, supervised steps, reinforcement learning.

The orchestra `program` plays the unchanged program through the gateway. First, a teacher that is often wrong answers
its calls, and a tiny random model is trained to imitate the teacher. Reinforcement learning then raises its accuracy.
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
from mcore_mas.config.estimators import AdvantageConfig
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
    VersionSpan,
)
from rollout.sandbox.guest.filters import can_confine
from rollout.teams.collect import Collector

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAMS = HERE / "programs"
# Virtual environment by requirements file. There are three, because some frameworks need different
# versions of one package.
ENVIRONMENTS = {
    "frameworks": ".venv-frameworks",
    "frameworks-2": ".venv-frameworks-2",
    "frameworks-3": ".venv-frameworks-3",
}
# Command-line agents of npm, and the file with their versions
NPM_PACKAGES = ROOT / ".npm-frameworks"
PACKAGE_FILE = HERE / "package.json"
# Paths that a coding agent reads in the sandbox
AGENT_FILES = (NPM_PACKAGES.resolve(), NPM_PACKAGES, PROGRAMS, Path("/proc"))
NUMBERS = range(1, 4)
TEACHER_ACCURACY = 0.35  # share of the teacher's replies that are right
UPDATES_PER_STEP = 4
COLD_START_STEPS = 400
_SHORT_PROMPT_TOKENS = 64
_MAX_LENGTH = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Length of a training.

    Args:
        demonstrated: trajectories of each sum that the teacher plays.
        evaluated: trajectories of each sum before the training, and after it.
        trained: trajectories of each sum in a step.
        steps: number of steps.
    """

    demonstrated: int = 16
    evaluated: int = 16
    trained: int = 4
    steps: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """An agent framework, the program that uses it, and the format of replies that the program can read.

    Args:
        package: name on the package index.
        shipped: files that the package, its source distribution or its project generator contains;
            the program first.
        ours: file in `programs/`: the program, or a script that gives the shipped team its task.
        arguments: arguments of the program.
        reply: template of a reply, with the sum at {0}.
        imported_late: package that starts threads when it is imported (see `warm.py`).
        rules: rules of the orchestra `program`.
        requirements: name of the file in requirements/.
        sandbox: True if the orchestra confines the program, where this machine can.
        coding_agent: argument of `code_agent.py`, for an agent that is an npm package.
        last_reply: reply to the result of a tool, after `reply` has called the tool.
        vocab: size of the tiny model's vocabulary.
        schedule: length of the training.
        replies: template of the replies of each agent, by the model name that the program asks for;
            for programs with several agents.
    """

    package: str
    shipped: tuple[str, ...] = ()
    ours: str = ""
    arguments: tuple[str, ...] = ()
    reply: str = "\\boxed{{{0}}}"
    imported_late: str = ""
    rules: Mapping[str, object] = field(default_factory=dict)
    requirements: str = "frameworks"
    sandbox: bool = False
    coding_agent: str = ""
    last_reply: str = ""
    vocab: int = 1024
    schedule: Schedule = Schedule()
    replies: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """Python of the framework's environment."""
        return ROOT / ENVIRONMENTS[self.requirements] / "bin" / "python"

    @property
    def installed(self) -> bool:
        """True if the framework's environment or npm packages are there."""
        return (NPM_PACKAGES / "node_modules" if self.coding_agent else self.python).exists()

    @property
    def agents(self) -> dict[str, str]:
        """Template of the replies by agent; a program without `replies` has one agent."""
        return dict(self.replies) or {"agent": self.reply}


def _coding_agent(
    package: str, name: str, *, tool: str, argument: str, sandbox: bool, schedule: Schedule
) -> Framework:
    """Return a coding agent, which writes a program with its shell tool and then ends.

    Its prompts have tens of thousands of characters, most of them the same in all trajectories. A
    large vocabulary has long tokens for them. A trajectory takes a second of CPU time, so there are
    fewer than in the other trainings.

    Args:
        package: name of the npm package.
        name: argument of `code_agent.py`.
        tool: name of the shell tool.
        argument: the tool's argument with the command.
        sandbox: True if the agent works in the sandbox.
        schedule: length of the training.
    """
    command = "echo 'print({0})' > answer.py"
    call = f'{{{{"name": "{tool}", "arguments": {{{{"{argument}": "{command}"}}}}}}}}'
    return Framework(
        package=package,
        ours="code_agent.py",
        coding_agent=name,
        sandbox=sandbox,
        reply=f"```tool\n{call}\n```",
        last_reply="Done.",
        vocab=20480,
        schedule=schedule,
        # A reply may write no program, or a broken one.
        rules={"most_calls": 4, "crash": "wrong", "at_once": 8},
    )


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
        imported_late="crewai",
    ),
    "smolagents": Framework(
        package="smolagents",
        shipped=("smolagents/cli.py",),
        arguments=(
            "{TASK}",
            "--tools",
            "--model-type",
            "OpenAIModel",
            "--model-id",
            "gpt-4o-mini",
            "--api-base",
            "{OPENAI_BASE_URL}",
            "--api-key",
            "{OPENAI_API_KEY}",
        ),
        reply="Thought: I add.\n<code>\nfinal_answer('\\\\boxed{{{0}}}')\n</code>",
        rules={"most_calls": 4, "crash": "wrong"},  # the program makes up to 20 calls
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
        rules={"most_calls": 4},  # the program asks again after a malformed output
    ),
    "LlamaIndex": Framework(
        package="llama-index-core", ours="sum_llamaindex.py", requirements="frameworks-2"
    ),
    "DSPy": Framework(
        package="dspy",
        ours="sum_dspy.py",
        imported_late="dspy",  # reads the folder of its cache when it is imported
        requirements="frameworks-2",
        reply="[[ ## reasoning ## ]]\nI add.\n\n[[ ## answer ## ]]\n{0}\n\n[[ ## completed ## ]]",
        rules={"most_calls": 4},  # the program asks again, for JSON, after a malformed reply
    ),
    "Microsoft Agent Framework": Framework(
        package="agent-framework-core",
        ours="sum_agent_framework.py",
        requirements="frameworks-2",
    ),
    "CAMEL": Framework(package="camel-ai", ours="sum_camel.py", requirements="frameworks-3"),
    "two policies": Framework(
        package="openai",
        ours="plan_and_work.py",
        requirements="frameworks-2",
        replies={"planner": "What is {a}+{b}?", "worker": "\\boxed{{{0}}}"},
    ),
    "Codex": _coding_agent(
        "@openai/codex",
        "codex-functions",
        tool="exec_command",
        argument="cmd",
        sandbox=False,
        schedule=Schedule(demonstrated=8, evaluated=8, steps=10),
    ),
    "Claude Code": _coding_agent(
        "@anthropic-ai/claude-code",
        "claude",
        tool="Bash",
        argument="command",
        sandbox=True,
        schedule=Schedule(demonstrated=4, evaluated=4, steps=8),
    ),
}


def sums() -> list[Task]:
    """Return the tasks: every sum of two of NUMBERS."""
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


Demonstration = tuple[tuple[Message, ...], str]  # prompt and reply


@dataclass(slots=True)
class Teacher:
    """A policy that is often wrong, and records its prompts and replies.

    Its n-th reply to a prompt depends on the prompt and n only, so the set of replies does not depend
    on the order of the trajectories.

    Args:
        reply: template of a reply, with the sum at {0}.
        last_reply: reply to the result of a tool, or "": `reply`.
        demonstrations: prompts and replies so far.
        times_asked: number of times by prompt.
    """

    reply: str
    last_reply: str = ""
    demonstrations: list[Demonstration] = field(default_factory=list)
    times_asked: Counter[str] = field(default_factory=Counter)

    async def say(
        self, messages: Sequence[Message], sampling: Sampling, chat: ChatState | None = None
    ) -> PolicyReply:
        prompt = write_tools_as_text(messages, chat.tools if chat else ())
        content = "\n".join(message.content for message in prompt)
        questions = re.findall(r"What is (\d)\+(\d)\?", content)
        a, b = map(int, questions[-1]) if questions else (0, 0)

        key = repr(prompt)
        self.times_asked[key] += 1
        random = Random(f"{key}{self.times_asked[key]}")
        answer = a + b
        if random.random() >= TEACHER_ACCURACY:
            answer = random.choice([wrong for wrong in range(2, 7) if wrong != a + b])
        text = self.reply.format(answer, a=a, b=answer - a)
        if self.last_reply and messages[-1].role == "tool":
            text = self.last_reply
        self.demonstrations.append((tuple(prompt), text))
        span = VersionSpan(version=0, start=0, end=0)
        completion = Completion(token_ids=(), logprobs=(), finish_reason="stop", versions=(span,))
        return PolicyReply(text=text, raw=text, prompt_ids=(), completion=completion)


def framework_teachers(framework: Framework) -> dict[str, Teacher]:
    """Return a teacher for each agent."""
    return {
        agent: Teacher(reply, framework.last_reply) for agent, reply in framework.agents.items()
    }


def shipped_files(framework: Framework) -> list[Path]:
    """Return the paths of the shipped files of a framework's program."""
    environment = framework.python.parents[1]
    folders = [
        *environment.glob("lib/python*/site-packages"),
        *environment.glob("sources/*/"),
    ]
    files = []
    for name in framework.shipped:
        candidates = [folder / name for folder in folders]
        files.append(next(path for path in candidates if path.exists()))
    return files


def digest_of(framework: Framework) -> str:
    """Return the SHA-256 of the concatenated shipped files."""
    content = b"".join(path.read_bytes() for path in shipped_files(framework))
    return hashlib.sha256(content).hexdigest()


def program_of(framework: Framework, folder: Path) -> tuple[list[Path], Path]:
    """Return the import paths of the program, and the program.

    The program is ours or the shipped one. If a documentation page is shipped, the program is its
    only Python block, which is written to `folder`.
    """
    shipped = shipped_files(framework)
    if framework.ours:
        return [path.parent for path in shipped[:1]], PROGRAMS / framework.ours
    if shipped[0].suffix == ".mdx":
        page = shipped[0].read_text(encoding="utf-8")
        (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        (folder / "program.py").write_text(code, encoding="utf-8")
        return [], folder / "program.py"
    return [Path(str(shipped[0]).removesuffix(framework.shipped[0]))], shipped[0]


def _tiktoken_cache() -> str:
    """Return the folder of LlamaIndex that has the vocabularies of OpenAI's models, or "" without LlamaIndex.

    CAMEL counts tokens with tiktoken, which otherwise downloads a vocabulary.
    """
    environment = ROOT / ENVIRONMENTS["frameworks-2"]
    folders = environment.glob("lib/python*/site-packages/llama_index/core/_static/tiktoken_cache")
    return str(next(folders, ""))


@contextmanager
def fork_server(framework: Framework, folder: Path) -> Iterator[tuple[str, ...]]:
    """Start a process that imports the framework; yield the command that runs the program in a fork of it."""
    socket = folder / "warm"
    script = str(HERE / "warm.py")
    paths, program = program_of(framework, folder)
    settings = {
        "PYTHONPATH": ":".join(map(str, paths)),
        "HOME": str(folder),  # some frameworks write files there
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "OTEL_SDK_DISABLED": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise every start downloads a list of prices
        "CREWAI_TESTING": "true",  # otherwise CrewAI asks the user about its traces
        "CREWAI_STORAGE_DIR": "crewai",
        "TIKTOKEN_CACHE_DIR": _tiktoken_cache(),
    }
    with (folder / "warm.log").open("w") as log:
        server = subprocess.Popen(
            [
                framework.python,
                "-W",
                "ignore",
                script,
                "serve",
                str(socket),
                framework.imported_late,
            ],
            env=os.environ | settings,
            cwd=folder,  # programs write into this folder
            stdout=log,
            stderr=log,
        )
        try:
            while not socket.exists():
                if server.poll() is not None:
                    raise RuntimeError((folder / "warm.log").read_text())
                time.sleep(0.05)
            assignments = [f"{name}={value}" for name, value in settings.items()]
            client = [sys.executable, "-I", "-S", script, "ask", str(socket), str(program)]
            yield ("env", *assignments, *client, *framework.arguments)
        finally:
            server.terminate()
            server.wait()


@contextmanager
def program_command(framework: Framework, folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield the command that runs the framework's program, or the coding agent."""
    if framework.coding_agent:
        program = str(PROGRAMS / framework.ours)
        yield (sys.executable, "-I", "-S", program, framework.coding_agent, str(NPM_PACKAGES))
    else:
        with fork_server(framework, folder) as command:
            yield command


class FrameworkTeam:
    """The team of a framework's program, with its environment and rewards."""

    def __init__(self, command: Sequence[str], seed: int, framework: Framework) -> None:
        rules = {"deadline_s": 120.0, "at_once": 4, **framework.rules}
        models = {"*": next(iter(framework.agents))}
        options: dict[str, object] = {"command": list(command), "models": models, "rules": rules}
        if framework.sandbox and can_confine():
            options["sandbox"] = list(map(str, AGENT_FILES))
        self.orchestra = OrchestraConfig(name="program", options=options).call
        self.env = build_env(EnvConfig(name="math"))
        self.agents = {
            name: AgentConfig(policy=name, role="program_agent", max_tokens=32)
            for name in framework.agents
        }
        self.allocate = build_allocator(RewardConfig(name="shared_outcome"), self.agents)
        self.seed = seed

    async def play(
        self, policies: Mapping[str, PolicyClient], *, step: int, group_size: int
    ) -> list[Group]:
        """Play every sum `group_size` times. Each agent has the policy of its name.

        Raises:
            RuntimeError: a trajectory failed.
        """
        collector = Collector(
            team=build_team(self.agents, policies),
            make_env=self.env,
            orchestra=self.orchestra,
            seed=self.seed,
            step=step,
        )
        groups = await collector.collect(sums(), group_size)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        errors = [trajectory.error for trajectory in trajectories if trajectory.error]
        if errors:
            raise RuntimeError(f"{len(errors)} trajectories failed; the first: {errors[0]}")
        return [self.allocate(group) for group in groups]


def accuracy_by_task(groups: Sequence[Group]) -> list[float]:
    """Return the mean outcome of each task's trajectories."""
    return [
        fmean(trajectory.outcome or 0.0 for trajectory in group.trajectories) for group in groups
    ]


def make_base_model(demonstrations: Sequence[Demonstration], folder: Path, vocab: int) -> None:
    """Train a tokenizer on the demonstrations, and write it with a model of random weights."""
    base = BaseModelConfig(
        layers=2, hidden=64, heads=4, kv_heads=4, ffn=192, vocab=vocab, positions=8192
    )
    texts: list[str] = []
    for prompt, reply in demonstrations:
        texts += [f"{message.role}\n{message.content}" for message in prompt]
        texts.append(reply)
    tokenizer = train_tokenizer(iter(texts), base.vocab, "phrases")
    tokenizer.save_pretrained(str(folder))
    init_model(tokenizer, base, derive_seed(1, "framework") % 2**63).save_pretrained(str(folder))


def cold_start(demonstrations: Sequence[Demonstration], folder: Path, out: Path) -> None:
    """Fine-tune a model on demonstrations, in the first half of the steps with only the end of each prompt.

    A small model learns to find the sum among 64 tokens, and then also finds it in whole prompts. With
    whole prompts of 2,000 tokens from the start, it does not learn to find the sum.
    """
    spec = TrainerSpec(
        model=str(folder), lr=2e-3, warmup_steps=20, objective=Objective(loss="cross_entropy")
    )
    trainer = MegatronTrainer(spec)
    renderer = Renderer(folder)
    random = Random(1)
    for step in range(COLD_START_STEPS):
        batch = []
        for messages, reply in random.sample(list(demonstrations), 32):
            prompt = renderer.render(messages)
            if step < COLD_START_STEPS // 2:
                prompt = prompt[-_SHORT_PROMPT_TOKENS:]
            batch.append(_supervised_sample(prompt, renderer.encode_reply(reply)))
        trainer.update(pack(weigh(batch, {"p": 1.0}), _MAX_LENGTH))
    trainer.model.write(out)


def _supervised_sample(prompt: tuple[int, ...], reply: tuple[int, ...]) -> Sample:
    return Sample(
        policy="p",
        agent="p",
        task="",
        trajectory="",
        turn=0,
        prompt_ids=(),
        completion_ids=prompt + reply,
        trained=(False,) * len(prompt) + (True,) * len(reply),
    )


async def train_with_rewards(
    team: FrameworkTeam, models: Mapping[str, Path], schedule: Schedule
) -> tuple[list[float], list[float], list[float]]:
    """Train the policy of each agent on every sum in each step.

    With several agents, the rewards of each agent are normalised among its own turns.

    Returns:
        Accuracy of each sum before and after the training, and of each step.
    """
    objective = Objective(loss="ppo_clip")
    trainers = {
        name: MegatronTrainer(TrainerSpec(model=str(model), lr=1e-3, objective=objective))
        for name, model in models.items()
    }
    engines = {
        name: LocalEngine(EmbeddedEngine.from_folder(model, max_length=_MAX_LENGTH, rows=64))
        for name, model in models.items()
    }
    policies = {
        name: EngineClient(engine=engines[name], renderer=Renderer(model), max_length=_MAX_LENGTH)
        for name, model in models.items()
    }
    estimator = AdvantageConfig(name="grpo" if len(models) == 1 else "drmas")
    estimators = dict.fromkeys(team.agents, estimator)

    before = accuracy_by_task(await team.play(policies, step=-1, group_size=schedule.evaluated))
    curve = []
    for step in range(schedule.steps):
        groups = await team.play(policies, step=step, group_size=schedule.trained)
        curve.append(fmean(accuracy_by_task(groups)))
        samples = add_advantages(to_samples(groups), estimators)
        for name, trainer in trainers.items():
            policy_samples = [sample for sample in samples if sample.policy == name]
            batch = weigh(policy_samples, {name: 1.0})
            for _ in range(UPDATES_PER_STEP):
                trainer.update(pack(batch, _MAX_LENGTH))
            await engines[name].load_weights(trainer.model.weights(), step + 1)
    after = accuracy_by_task(
        await team.play(policies, step=schedule.steps, group_size=schedule.evaluated)
    )
    return before, after, curve


def train(name: str, folder: Path) -> dict[str, object]:
    """Train a framework's program; return its accuracy before and after, and the interval of its gain."""
    framework = FRAMEWORKS[name]
    schedule = framework.schedule
    start = time.monotonic()
    cpu_start = time.process_time()
    init_process_groups(rank=0, threads=1)
    try:
        with program_command(framework, folder) as command:
            team = FrameworkTeam(command, seed=1, framework=framework)
            teachers = framework_teachers(framework)
            asyncio.run(team.play(teachers, step=-2, group_size=schedule.demonstrated))
            turns = sum(len(teacher.demonstrations) for teacher in teachers.values())
            models = {}
            for agent, teacher in teachers.items():
                demonstrations = sorted(teacher.demonstrations, key=repr)
                base = folder / f"base-{agent}"
                models[agent] = folder / f"model-{agent}"
                make_base_model(demonstrations, base, framework.vocab)
                cold_start(demonstrations, base, models[agent])
            before, after, curve = asyncio.run(train_with_rewards(team, models, schedule))
    finally:
        destroy_process_groups()
    gains = [trained - base for base, trained in zip(before, after, strict=True)]
    low, high = mean_interval(gains, name)
    return {
        "before": fmean(before),
        "after": fmean(after),
        "steps": schedule.steps,
        "low": low,
        "high": high,
        "curve": curve,
        "minutes": (time.monotonic() - start) / 60,
        "cpu_minutes": (time.process_time() - cpu_start) / 60,
        "turns": turns / (schedule.demonstrated * len(before)),
    }
