"""Config section `engine`: the engine of each policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from rollout.base.lookup import lookup
from rollout.base.section import Section
from rollout.base.signatures import check_call, check_methods
from rollout.base.urls import Url, check_private
from rollout.engines.registry import ENGINES, TRANSPORTS, transport_error
from rollout.engines.sglang.arguments import argument_error, graph_error, with_dashes

# Methods that an engine class of the user's own must have, with their parameters.
_REQUIRED_METHODS = {
    "async generate": ("prompt_ids", "sampling"),
    "async begin_update": (),
    "async commit_update": ("update",),
    "abort_update": ("error",),
    "async weights_lost": (),
}

_MIN_START_S = 900.0  # deadline of a server's start, without the time to read the model
_READ_BYTES_PER_S = 1e8  # speed of a busy network file system
_MIN_REQUEST_S = 600.0  # shortest default deadline of a request
# Assumed tokens per second of a server with all slots full. A 32B model on eight H100s decodes
# about 6000 in 256 slots.
_MIN_TOKENS_PER_S = 2000.0

# Settings of SGLang's servers, which have no effect on another engine.
SERVER_SETTINGS = (
    "python",
    "urls",
    "members",
    "key_file",
    "tp",
    "options",
    "environment",
    "compare_servers",
    "timeout_s",
    "start_s",
)

_SLOTS_ERROR = "adapters: slots needs name: sglang and transport: disk, without sleep and members"


class EngineConfig(Section):
    """Engine that samples the tokens of a policy."""

    # Engine by name, or the import path of a class.
    name: str = "embedded"
    # Maximum number of requests that are decoded at once.
    slots: int = Field(128, ge=1)
    # Maximum number of tokens of prompt and reply together.
    max_length: int = Field(512, ge=2)
    # Side of the last message that is cut if a prompt without a chat leaves no room for a reply;
    # wrong: the trajectory fails. Chats have when_full instead.
    overlong_prompts: Literal["wrong", "left", "middle", "right"] = "wrong"
    # Device of the embedded engine; auto: a GPU if the run computes on GPUs.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Give a reply the same bits in any batch.
    deterministic: bool = False
    # Route the tokens of a mixture in the trainer to the experts that the engine chose.
    router_replay: bool = False
    # Constrain replies to the JSON schema or the tool call that a call of the gateway requires.
    grammar: bool = False
    # Transport of new weights; None: the engine's default.
    transport: str | None = None
    # Folder for weights that trainer and engine see; None: one in /dev/shm, or in the run's folder
    # if the run joins a Ray or the embedded engine has replicas.
    weights_folder: Path | None = None
    # Free the engine's memory while policies are trained.
    sleep: bool = False
    # Maximum number of restarts within an hour, if processes of the engine die or hang.
    restarts: int = Field(2, ge=0)
    # Servers of each policy, or actors of the embedded engine.
    replicas: int = Field(1, ge=1)

    # Python of the environment that has SGLang, which starts the servers.
    python: Path | None = None
    # Servers of SGLang that run already.
    urls: tuple[Url, ...] = ()
    # File with the URLs of further servers, which may change during a training.
    members: Path | None = None
    # File with the API key of servers on other machines.
    key_file: Path | None = None
    # GPUs of each server.
    tp: int = Field(1, ge=1)
    # merged: send the merged weights of a policy with LoRA; slots: send its adapter, which the
    # servers hold in addition to the frozen model.
    adapters: Literal["merged", "slots"] = "merged"
    # Further arguments of sglang.launch_server.
    options: dict[str, JsonValue] = Field(default_factory=dict)
    # Environment variables of the servers.
    environment: dict[str, str] = Field(default_factory=dict)
    # Compare the weights of a policy's servers with each other after every update, by checksums.
    compare_servers: bool = True
    # Deadline of a request to a server in seconds; None: computed from slots and max_length.
    timeout_s: float | None = Field(None, gt=0)
    # Deadline of a server's first answer in seconds; None: computed from the model's size.
    start_s: float | None = Field(None, gt=0)

    def start_deadline_s(self, model: str | Path) -> float:
        """Return the seconds that a server of the model in the folder `model` may take to start."""
        if self.start_s is not None:
            return self.start_s
        size = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
        return _MIN_START_S + size / _READ_BYTES_PER_S

    @property
    def request_deadline_s(self) -> float:
        """Seconds that a request may take: enough to fill every slot once, at least ten minutes."""
        if self.timeout_s is not None:
            return self.timeout_s
        return max(_MIN_REQUEST_S, self.slots * self.max_length / _MIN_TOKENS_PER_S)

    @property
    def servers(self) -> int:
        """Number of servers, or of the embedded engine's actors, for each policy."""
        return len(self.urls) or self.replicas

    @field_validator("options")
    @classmethod
    def _check_options(
        cls, options: dict[str, JsonValue], info: ValidationInfo
    ) -> dict[str, JsonValue]:
        if info.data.get("name") == "sglang":
            problem = argument_error(options)
            if problem:
                raise ValueError(problem)
        return options

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.name not in ENGINES:
            self._check_own_class()
        if self.name == "sglang":
            self._check_sglang()
        else:
            self._refuse_sglang_settings()
        if self.key_file:
            for url in self.urls:
                check_private("urls", url)
        if self.name in TRANSPORTS and self.transport is not None:
            problem = transport_error(self.name, self.transport)
            if problem:
                raise ValueError(problem)
        if self.router_replay and self.name not in TRANSPORTS:
            raise ValueError(
                f"router_replay: '{self.name}' does not say which experts it chose; "
                f"use {' or '.join(TRANSPORTS)}"
            )
        if self.grammar:
            self._check_grammar()
        return self

    def _check_grammar(self) -> None:
        if self.name not in TRANSPORTS:
            raise ValueError(
                f"grammar: '{self.name}' does not say that it follows grammars, and the trainer "
                f"would assume it; use {' or '.join(TRANSPORTS)}"
            )
        options = with_dashes(self.options)
        if options.get("grammar-backend", "llguidance") != "llguidance":
            raise ValueError(
                "grammar: the trainer computes the masks of llguidance; remove "
                "options.grammar-backend"
            )
        if options.get("reasoning-parser"):
            raise ValueError(
                "grammar: with options.reasoning-parser, SGLang samples thoughts without the "
                "grammar, which already allows them; remove it"
            )

    def _check_own_class(self) -> None:
        engine_class: Any = lookup("engine", self.name, ENGINES)
        description = f"engine '{self.name}'"
        check_call(description, engine_class, ("model",), keywords=("rows", "max_length", "place"))
        if isinstance(engine_class, type):
            check_methods(description, engine_class, _REQUIRED_METHODS)
        if self.replicas > 1:
            raise ValueError(
                f"replicas: {description} is made once for each policy; leave this out"
            )

    def _check_sglang(self) -> None:
        if not self.python and not self.urls:
            raise ValueError(
                "sglang needs python, the interpreter of its own environment "
                "(requirements/sglang.txt), or urls"
            )
        if self.sleep and not self.urls:
            problem = graph_error(self.options, self.environment)
            if problem:
                raise ValueError(f"environment: {problem}")
        takes_slots = self.transport in (None, "disk") and not self.members and not self.sleep
        if self.adapters == "slots" and not takes_slots:
            raise ValueError(_SLOTS_ERROR)
        if self.device == "cuda":
            raise ValueError(
                "device is a setting of the embedded engine; sglang takes the GPUs there are"
            )

    def _refuse_sglang_settings(self) -> None:
        """Raise ValueError if another engine than SGLang has a setting that only SGLang's servers have."""
        fields = type(self).model_fields
        changed_settings = []
        for key in SERVER_SETTINGS:
            if getattr(self, key) != fields[key].get_default(call_default_factory=True):
                changed_settings.append(key)
        if changed_settings:
            raise ValueError(
                f"{', '.join(changed_settings)}: only for SGLang's servers, and name is '{self.name}'; "
                "set name: sglang, or leave this out"
            )
        if self.adapters == "slots":
            raise ValueError(_SLOTS_ERROR)
