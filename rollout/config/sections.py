"""The rollout side's config sections: who is in the team, in which world, and how it is rewarded."""

from __future__ import annotations

import builtins
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import Field, model_validator

from rollout.base.deadlines import Limits
from rollout.base.http import check_url
from rollout.base.registry import lookup
from rollout.base.section import Section
from rollout.engines import ENGINES, TRANSPORTS
from rollout.environments import ENVS
from rollout.orchestras import ORCHESTRAS
from rollout.records.trajectory import Group, Task
from rollout.rewards import ALLOCATORS
from rollout.rewards.penalties import PENALTIES
from rollout.teams.graph import check_agents, read_graph
from rollout.teams.team import ROLES

_NOBODY = Group(task=Task(id="", prompt="", answers=(), env="", source="", split="train"), trajectories=())


class Choice(Section):
    """Something chosen by name, with keyword options that its function understands."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    def check(self, kind: str, known: dict[str, Callable[..., Any]], *given: str) -> None:
        """Refuse an unknown name, or options that the chosen function does not take.

        Args:
            given: keyword arguments that are supplied at run time and so are not options.

        Raises:
            ValueError: also an UnknownName.
        """
        chosen = lookup(kind, self.name, known)
        if not callable(chosen):
            raise ValueError(f"{kind} '{self.name}' is a {type(chosen).__name__}; expected something to call")
        parameters = inspect.signature(chosen).parameters.values()
        options = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in given}
        for name in self.options:
            if name not in options:
                known_options = ", ".join(options) or "none"
                raise ValueError(f"{kind} '{self.name}' has no option '{name}'; its options: {known_options}")
        hints = _hints(chosen)
        for name, value in self.options.items():
            allowed = get_args(hints[name]) if get_origin(hints.get(name)) is Literal else None
            if allowed is not None and value not in allowed:
                expected = ", ".join(map(str, allowed))
                raise ValueError(f"{kind} '{self.name}': option {name} is {value!r}; expected one of {expected}")
        missing = [name for name, p in options.items() if p.default is p.empty and name not in self.options]
        if missing:
            raise ValueError(f"{kind} '{self.name}' needs option '{missing[0]}'")


def _hints(chosen: Callable[..., Any]) -> dict[str, Any]:
    """The types of a callable's options; none where they cannot be read at run time."""
    function = chosen if inspect.isroutine(chosen) else type(chosen).__call__
    try:
        return get_type_hints(function, localns=_Names(function.__globals__))
    except (AttributeError, NameError, TypeError):
        return {}


class _Names(dict[str, Any]):
    """A module's names; those that it imports for type checkers only stand for anything."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


class OrchestraConfig(Choice):
    """Who speaks when."""

    @model_validator(mode="after")
    def _known(self) -> OrchestraConfig:
        self.check("orchestra", ORCHESTRAS)
        if self.name == "graph":
            read_graph(self.options["graph"])
        return self

    def check_agents(self, team: Mapping[str, AgentConfig]) -> None:
        """Refuse a graph that asks for an agent who is not in `team`, or leaves a slot of its template open."""
        if self.name == "graph":
            roles = {name: lookup("agent role", agent.role or name, ROLES) for name, agent in team.items()}
            templates = {
                name: agent.user if agent.user is not None else roles[name].user for name, agent in team.items()
            }
            check_agents(read_graph(self.options["graph"]), templates)


class EnvConfig(Choice):
    """The world the team acts in."""

    @model_validator(mode="after")
    def _known(self) -> EnvConfig:
        self.check("env", ENVS, "retriever", "sandbox")
        if self.name in ENVS:
            check_url("server", self.options.get("server"), secret=False)
        return self


class RewardConfig(Choice):
    """How a trajectory's outcome becomes a reward per turn, and what each turn's own reply adds to it."""

    penalties: dict[str, dict[str, Any]] = Field(default_factory=dict)  # options by name in PENALTIES

    @model_validator(mode="after")
    def _known(self) -> RewardConfig:
        self.check("reward", ALLOCATORS)
        for name, options in self.penalties.items():
            Choice(name=name, options=options).check("penalty", PENALTIES)
        if self.name in ALLOCATORS:  # which check their options before they look at a trajectory
            try:
                ALLOCATORS[self.name](_NOBODY, **self.options)
            except (TypeError, AttributeError) as error:
                raise ValueError(f"reward '{self.name}': an option has the wrong type ({error})") from error
        return self

    def check_agents(self, team: Collection[str]) -> None:
        """Refuse options of registered allocators and penalties that name an agent who is not in `team`.

        In these options every key of a mapping, and every text in a list, is an agent's name.
        """
        sections = {self.name: self.options} if self.name in ALLOCATORS else {}
        sections |= {name: options for name, options in self.penalties.items() if name in PENALTIES}
        for section, options in sections.items():
            for option, value in options.items():
                names = value if isinstance(value, dict | list | tuple) else ()
                for name in names:
                    if isinstance(name, str) and name not in team:
                        raise ValueError(
                            f"reward '{section}': {option} names agent '{name}', who is not in the team; "
                            f"agents: {', '.join(team)}"
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
    max_tokens: int = Field(512, ge=1)  # of one reply

    @model_validator(mode="after")
    def _known(self) -> AgentConfig:
        if self.role:
            lookup("agent role", self.role, ROLES)
        return self


class EngineConfig(Section):
    """Where each policy's tokens are sampled."""

    name: str = "embedded"  # in ENGINES
    slots: int = Field(128, ge=1)  # requests decoded at once
    max_length: int = Field(512, ge=2)  # tokens of prompt and reply
    device: Literal["cpu", "cuda"] = "cpu"  # that the embedded engine computes on
    deterministic: bool = False  # compute each sequence by itself: a run is then repeated to the bit
    transport: str | None = None  # of new weights; None: the engine's own
    weights_folder: Path | None = None  # folder that trainer and engine see; None: one in shared memory
    sleep: bool = False  # give memory away while policies are trained
    restarts: int = Field(2, ge=0)  # of an engine that dies, in a run
    # of name: sglang
    python: Path | None = None  # interpreter of SGLang's own environment ...
    urls: tuple[str, ...] = ()  # ... or servers that run already
    key_file: Path | None = None  # of servers on other machines
    replicas: int = Field(1, ge=1)  # servers per policy
    tp: int = Field(1, ge=1)  # GPUs of each
    options: dict[str, Any] = Field(default_factory=dict)  # further arguments of sglang.launch_server
    environment: dict[str, str] = Field(default_factory=dict)  # variables of the servers
    verify: bool = True  # compare checksums after every update, where the server can
    timeout_s: float = Field(600.0, gt=0)  # of one request
    start_s: float = Field(900.0, gt=0)  # that a server may take to answer first

    @model_validator(mode="after")
    def _usable(self) -> EngineConfig:
        lookup("engine", self.name, ENGINES)
        if self.name == "sglang" and not self.python and not self.urls:
            raise ValueError(
                "sglang needs python, the interpreter of its own environment (requirements/sglang.txt), or urls"
            )
        if self.name == "embedded" and (self.python or self.urls or self.options):
            raise ValueError("python, urls and options are settings of sglang; set name: sglang")
        if self.name == "sglang" and self.device != "cpu":
            raise ValueError("device is a setting of the embedded engine; sglang takes the GPUs there are")
        if self.name == "scripted":
            raise ValueError("the scripted engine has canned replies, for tests in Python; no run can be made of them")
        for url in self.urls:
            check_url("urls", url, secret=self.key_file is not None)
        known = TRANSPORTS.get(self.name)
        if known and self.transport not in (None, *known):
            raise ValueError(f"{self.name} has no transport '{self.transport}'; known: {', '.join(known)}")
        return self


class CollectionConfig(Section):
    """How long the parts of a collection may take, in seconds; None is any time."""

    call_s: float | None = Field(None, gt=0)  # one reply of a policy's engine, from when the engine is asked
    tool_s: float | None = Field(None, gt=0)  # one step or other call of the environment
    trajectory_s: float | None = Field(None, gt=0)
    batch_s: float | None = Field(None, gt=0)  # all trajectories that a step, a validation or an evaluation plays
    stall_s: float | None = Field(120.0, gt=0)  # without anything finished, until it is said who waits for what

    @model_validator(mode="after")
    def _nested(self) -> CollectionConfig:
        for inner, outer in itertools.combinations(("call_s", "tool_s", "trajectory_s", "batch_s"), 2):
            most, own = getattr(self, outer), getattr(self, inner)
            if outer != "tool_s" and own is not None and most is not None and own > most:
                raise ValueError(f"{inner} {own:g} never comes: {outer} {most:g} is over before; lower it or drop it")
        return self

    @property
    def limits(self) -> Limits:
        """What `collect` is to keep to."""
        return Limits(tool_s=self.tool_s, trajectory_s=self.trajectory_s, batch_s=self.batch_s)
