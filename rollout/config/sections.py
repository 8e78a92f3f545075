"""Rollout sections of a config (agents, orchestra, environment, reward, engine, deadlines), and what they build."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from rollout.base.lookup import lookup
from rollout.base.options import Registry
from rollout.base.section import Section
from rollout.base.signatures import check_call, check_methods
from rollout.base.text import nearest_hint
from rollout.base.urls import Url
from rollout.engines import Engine, EngineClient, PolicyClient
from rollout.environments import ENVS, TOOLS
from rollout.environments.protocol import Env
from rollout.models.chat_template import Renderer
from rollout.orchestras import CHATS, ORCHESTRAS
from rollout.orchestras.program import check_program
from rollout.records.trajectory import Group, Sampling, Task, Turn
from rollout.rewards import ALLOCATORS
from rollout.rewards.penalties import PENALTIES, apply_penalties
from rollout.teams.collect import Deadlines
from rollout.teams.episode import Episode
from rollout.teams.roles import (
    ROLES,
    Agent,
    ChatRules,
    Role,
    asked_agents,
    filled_slots,
    misused,
    template_slots,
)
from rollout.teams.team import Team, TeamSession


class Choice(Section):
    """Something chosen by name, with options that are typed by the signature of what is chosen."""

    registry: ClassVar[Registry]

    name: str
    options: dict[str, Any] = Field(default_factory=dict, validate_default=True)

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        cls.registry.model(name)
        return name

    @field_validator("options")
    @classmethod
    def _typed(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "name" in info.data:
            cls.registry.arguments(info.data["name"], options)
        return options

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments of what is chosen, in its parameters' types."""
        return self.registry.arguments(self.name, self.options)

    @cached_property
    def call(self) -> Callable[..., Any]:
        """What is chosen, with its options filled in."""
        return partial(self.registry.find(self.name), **self.arguments)

    def model_post_init(self, _: Any) -> None:
        """Look both up where the config is read, once for all steps."""
        _ = self.call


TOOL_REGISTRY = Registry(
    kind="tool", known=TOOLS, takes=(), supplied=frozenset({"env", "sandbox", "calls"}), own=False
)
PENALTY_REGISTRY = Registry(kind="penalty", known=PENALTIES, takes=("turn",))
Chosen = dict[str, dict[str, Any]]  # options by name
_PLAYED = {"reset": ("task",), "async step": ("action",)}  # methods of an environment


def _typed(registry: Registry, chosen: Chosen) -> Chosen:
    for name, options in chosen.items():
        registry.arguments(name, options, place=(name,))
    return chosen


class OrchestraConfig(Choice):
    """Who speaks when."""

    registry = Registry(
        kind="orchestra", known=ORCHESTRAS, takes=("task", "team", "env"), coroutine=True
    )

    def check_agents(self, team: Mapping[str, AgentConfig]) -> None:
        """Refuse a graph that asks for an agent who is not in `team`, or leaves a slot of its template open.

        Or tools where nobody chats, a summariser who is not there, or a program that cannot play.
        """
        for name, agent in team.items():
            if agent.tools and self.name in ORCHESTRAS and self.name not in CHATS:
                raise ValueError(
                    f"agent '{name}' has tools, and orchestra '{self.name}' opens no chats in which to call them; "
                    f"those that do: {', '.join(sorted(CHATS))}"
                )
        templates = {name: build_role(name, agent).user for name, agent in team.items()}
        summing = {
            agent.chats.summariser for agent in team.values() if agent.chats.summariser is not None
        }
        for name in summing:
            if name not in team or set(template_slots(name, templates[name])) != {"conversation"}:
                raise ValueError(
                    f"chats.summariser '{name}': expected an agent whose user template has the slot "
                    f"{{conversation}} alone, as role chat_summariser's; agents: {', '.join(team)}"
                )
        if self.name == "program":
            check_program(team, **self.options)
            return  # its prompts are the program's own
        if self.name == "graph":
            self.arguments["graph"].check_agents(templates)
            return
        own = self.registry.find(self.name) if self.name not in ORCHESTRAS else None
        if own is not None and (unknown := misused(own, Task, TeamSession, Episode)):
            raise ValueError(f"orchestra '{self.name}': {unknown}")
        for name in sorted((asked_agents(own) if own is not None else frozenset()) - team.keys()):
            raise ValueError(
                f"orchestra '{self.name}' asks agent '{name}', who is not in the team; agents: {', '.join(team)}"
                f"{nearest_hint(name, team)}"
            )
        for name, template in templates.items():
            if (
                name in summing
                or (filled := filled_slots(self.registry.find(self.name), name)) is None
            ):
                continue
            for slot in template_slots(name, template):
                if slot not in filled:
                    some = f"it fills {', '.join(sorted(filled))}; " if len(filled) < 10 else ""
                    raise ValueError(
                        f"agent '{name}': orchestra '{self.name}' does not fill the slot {{{slot}}} of its user "
                        f"template; {some}a brace itself is written twice{nearest_hint(slot, filled)}"
                    )


class EnvConfig(Choice):
    """The world the team acts in."""

    registry = Registry(
        kind="env", known=ENVS, takes=("task",), supplied=frozenset({"retriever", "sandbox"})
    )

    @property
    def needs(self) -> frozenset[str]:
        """What a run must supply to it."""
        return self.registry.needs(self.name)

    @property
    def names_states(self) -> bool:
        """Whether it says in which state a turn is, so that trajectories may meet in one."""
        return hasattr(lookup("env", self.name, ENVS), "state")

    def check_tools(self, team: Mapping[str, AgentConfig]) -> None:
        """Refuse the tools `search` and `passages` where the environment does not search."""
        for name, agent in team.items():
            for tool in {"search", "passages"} & set(agent.tools):
                if self.name in ENVS and self.name != "search":
                    raise ValueError(
                        f"agent '{name}': tool '{tool}' asks env 'search', and this is env '{self.name}'"
                    )

    @model_validator(mode="after")
    def _reachable(self) -> EnvConfig:
        made = self.registry.find(self.name)
        if isinstance(made, type):  # what a function makes is seen by `check_made`
            check_methods(f"env '{self.name}'", made, _PLAYED)
        return self

    def check_made(self, task: Task) -> None:
        """Refuse an environment that cannot be made of `task`, or cannot play or begin it.

        Raises:
            ValueError: says which, and what it lacks.
        """
        if self.needs:
            return

        def tried(does: str, call: Callable[[Task], Any]) -> Any:
            try:
                return call(task)
            except Exception as error:
                what = f"{type(error).__name__}: {error}".partition("\n")[0]
                other = (
                    f"; its tasks are of env '{task.env}'"
                    if task.env != self.name and self.name in ENVS
                    else ""
                )
                raise ValueError(
                    f"env '{self.name}' cannot {does} task '{task.id}' ({what}){other}"
                ) from error

        made = tried("be made of", self.call)
        check_methods(f"env '{self.name}'", made, _PLAYED)
        if not hasattr(made, "open"):  # which takes hold of something that `reset` needs
            tried("begin", made.reset)


class RetrieverConfig(Section):
    """The search engine that the team's environment asks."""

    # Servers that run elsewhere; without them, each job of the run starts a server beside itself.
    urls: tuple[Url, ...] = ()
    key_file: Path | None = None  # file with the bearer token of `urls`
    patience_s: float = Field(1800.0, ge=0)  # time that the run waits while no server answers
    timeout_s: float = Field(300.0, gt=0)  # of one search, including its wait behind others

    # The index of a server beside the run.
    passages: Path | None = None  # corpus to index; None: the one of the task generator
    folder: Path | None = None  # a published index with its index.json, instead of an own one
    encoder: Literal["minilm", "e5", "bge"] = "minilm"
    encoder_folder: Path | None = None  # Hugging Face folder; None: the MiniLM package
    index: Literal["flat", "sq8", "ivf", "ivfpq", "hnsw"] = "flat"
    shards: int = Field(1, ge=1)  # jobs that encode the passages
    golden: Path | None = None  # queries and the ids that they should find, for `probe_retriever`

    # The server beside the run.
    ranking: Literal["dense", "bm25", "hybrid"] = "dense"  # vectors, words, or both fused
    device: Literal["cpu", "cuda"] = "cpu"  # of the encoder and of a flat index
    python: Path | None = None  # interpreter of retrieval/environment.yml; None: the run's own
    threads: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _check(self) -> RetrieverConfig:
        sources = [key for key in ("urls", "passages", "folder") if getattr(self, key)]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} say where passages are; set one of them")
        if self.encoder != "minilm" and self.encoder_folder is None:
            raise ValueError(
                f"encoder {self.encoder} has no folder; set encoder_folder, such as "
                "models/e5-base-v2"
            )
        if self.ranking == "bm25" and self.shards > 1:
            raise ValueError("ranking bm25 encodes no passages; leave out shards")
        if self.key_file is not None and not self.urls:
            raise ValueError(
                "key_file is the token of servers that run elsewhere; set urls too, or leave it out"
            )
        return self

    @property
    def elsewhere(self) -> bool:
        """True if the servers run elsewhere."""
        return bool(self.urls)

    @property
    def gpus(self) -> int:
        """Number of GPUs of the server beside a run: the last one of the machine, or none."""
        return int(self.device == "cuda" and not self.elsewhere)


class RewardConfig(Choice):
    """How a trajectory's outcome becomes a reward per turn, and what each turn's own reply adds to it."""

    registry = Registry(kind="reward", known=ALLOCATORS, takes=("group",))

    penalties: Annotated[Chosen, AfterValidator(partial(_typed, PENALTY_REGISTRY))] = Field(
        default_factory=dict
    )

    def check_agents(self, team: Collection[str]) -> None:
        """Refuse options of registered allocators and penalties that name an agent who is not in `team`."""
        sections = {self.name: self.options} if self.name in ALLOCATORS else {}
        sections |= {name: options for name, options in self.penalties.items() if name in PENALTIES}
        for section, options in sections.items():
            check_named(f"reward '{section}'", options, team)


def check_named(whose: str, options: Mapping[str, Any], team: Collection[str]) -> None:
    """Refuse `options` in which a key of a mapping, or a text in a list, is not the name of an agent in `team`."""
    for option, value in options.items():
        for name in value if isinstance(value, dict | list | tuple) else ():
            if isinstance(name, str) and name not in team:
                raise ValueError(
                    f"{whose}: {option} names agent '{name}', who is not in the team; "
                    f"agents: {', '.join(team)}{nearest_hint(name, team)}"
                )


class AgentConfig(Section):
    """What changes behaviour or credit belongs to an agent."""

    policy: str  # which policy it plays
    role: str = ""  # name in ROLES; "" is the agent's own name
    system: str | None = None  # replaces the role's system prompt
    user: str | None = None  # replaces the role's user template
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_tokens: int = Field(256, ge=1)  # of one reply

    # that its chats may call
    tools: Annotated[Chosen, AfterValidator(partial(_typed, TOOL_REGISTRY))] = Field(
        default_factory=dict
    )
    chats: ChatRules = ChatRules()

    @field_validator("role")
    @classmethod
    def _known(cls, role: str) -> str:
        if role:
            lookup("agent role", role, ROLES)
        return role


class CollectionConfig(Deadlines):
    """How long the parts of a collection may take, in seconds (None is any time), and how much of it may be lost."""

    stall_s: float | None = Field(
        120.0, gt=0
    )  # without anything finished, until it is said who waits for what
    # share of an agent's answers that nobody may be able to judge; from more on they count as wrong
    max_undecided: float = Field(0.05, ge=0, le=1)
    # share of a step's trajectories that an error in the code of team, environment or tool may take; more end the run
    max_quarantined: float = Field(0.25, ge=0, le=1)

    @model_validator(mode="after")
    def _nested(self) -> CollectionConfig:
        for inner, outer in itertools.combinations(
            ("call_s", "tool_s", "trajectory_s", "batch_s"), 2
        ):
            most, own = getattr(self, outer), getattr(self, inner)
            if outer != "tool_s" and own is not None and most is not None and own > most:
                raise ValueError(
                    f"{inner} {own:g} never comes: {outer} {most:g} is over before; lower it or drop it"
                )
        return self


def build_role(name: str, config: AgentConfig) -> Role:
    """The agent's role with the config's prompts in place of the role's own."""
    role = lookup("agent role", config.role or name, ROLES)
    check_call(
        f"agents.{name}.role '{config.role or name}'",
        getattr(role, "parse", role),
        ("text",),
        keywords=(),
    )
    if not isinstance(role, Role):  # a parser alone, whose prompts the config has
        role = Role(name=name, system="", user="", parse=role)
    system = role.system if config.system is None else config.system
    return replace(role, system=system, user=role.user if config.user is None else config.user)


def build_team(agents: Mapping[str, AgentConfig], players: Mapping[str, PolicyClient]) -> Team:
    """The team of `agents`, each playing its policy's player."""
    return Team({name: _build_agent(name, config) for name, config in agents.items()}, players)


def _build_agent(name: str, config: AgentConfig) -> Agent:
    return Agent(
        name=name,
        role=build_role(name, config),
        policy=config.policy,
        sampling=Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=config.max_tokens,
        ),
        chats=config.chats,
        tools={
            tool: partial(TOOLS[tool], **TOOL_REGISTRY.arguments(tool, options))
            for tool, options in config.tools.items()
        },
    )


def build_player(
    engine: Engine,
    renderer: Renderer,
    *,
    max_in_flight: int | asyncio.Semaphore | None = None,
    **settings: Any,
) -> EngineClient:
    """A player with at most `max_in_flight` calls under way at once, first come, first served, and its own settings.

    A semaphore bounds the calls of all players that have it.
    """
    slots = asyncio.Semaphore(max_in_flight) if isinstance(max_in_flight, int) else max_in_flight
    return EngineClient(engine=engine, renderer=renderer, slots=slots or nullcontext(), **settings)


def build_env(config: EnvConfig, **tools: Any) -> Callable[[Task], Env]:
    """A maker of fresh environments; `tools` are the live things an environment needs, such as a retriever."""
    return partial(config.call, **tools)


def build_allocator(
    config: RewardConfig, agents: Mapping[str, AgentConfig]
) -> Callable[[Group], Group]:
    """The allocator with its options, and after it the penalties; every reward is checked on its way out."""
    limits = {name: agent.max_tokens for name, agent in agents.items()}
    penalties: list[Callable[[Turn], float | None]] = []
    for name, options in config.penalties.items():
        penalty = lookup("penalty", name, PENALTIES)
        if (
            "max_tokens" in inspect.signature(penalty).parameters
        ):  # the agents' own, where the config sets no other
            options = {**options, "max_tokens": {**limits, **options.get("max_tokens", {})}}
        penalties.append(partial(penalty, **options))
    return partial(apply_penalties, allocate=config.call, penalties=penalties)
