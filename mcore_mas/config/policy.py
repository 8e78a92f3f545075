"""Sections of a config about training: policies, the trainer's steps, cold start, evaluation, tracking."""

import re
from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import unquote, urlsplit

from pydantic import Field, JsonValue, PositiveFloat, field_validator, model_validator

from mcore_mas.equations.divergence import Figure
from rollout.base.nested import merged
from rollout.base.section import Section
from rollout.engines.remote import RemoteConfig
from rollout.models.layout import Projection, Recompute
from rollout.teams.tree import Branching


class RateConfig(Section):
    """The learning rate of every update."""

    lr: float = Field(gt=0)
    warmup_steps: int = Field(
        0, ge=0
    )  # updates of linear warm-up; training steps with trainer.minibatch
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    min_lr: float = Field(0.0, ge=0)  # where the schedule ends
    decay_steps: int | None = Field(
        None, ge=1
    )  # as warmup_steps, until there, these included; None: the run's end

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}; a schedule falls")
        return self


class LoraConfig(Section):
    """Low-rank adapters on a frozen model: W + alpha / rank · B A (Hu et al. 2021, arXiv 2106.09685).

    Without dropout, as engine and trainer must compute the same function.
    """

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    targets: tuple[Projection, ...] = Field(
        get_args(Projection), min_length=1
    )  # projections of every layer
    adapter: str | None = None  # folder in PEFT's format to start from; None: A random, B zero

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


class CriticConfig(RateConfig):
    """A value head on a copy of the policy's first model."""

    clip: float = Field(0.2, gt=0)  # of a value's change in one step, in reward units
    head_start: int = Field(
        0, ge=0
    )  # training steps in which it is trained, and its policy not yet


_Decay = Annotated[float, Field(ge=0, lt=1)]
_OF_SGLANG = ("python", "urls", "members", "key_file", "options", "environment", "adapters")
_OF_ONE_ENGINE = (*_OF_SGLANG, "transport", "device", "joining")
_OWN_ENGINE = (
    "name",
    "slots",
    "max_length",
    "overlong_prompts",
    "replicas",
    "tp",
    "router_replay",
    *_OF_ONE_ENGINE,
)
_OWN_SETTINGS = {  # of the run's sections, that a policy may have of its own
    "engine": _OWN_ENGINE,
    "loss": ("name", "options", "aggregation", "norm", "entropy", "kl", "correction"),
    "trainer": ("microbatch_tokens", "updates_per_step", "minibatch", "passes"),
}


class OwnConfig(Section):
    """Settings in place of the run's, in its own sections: a mapping goes into the run's key by key."""

    engine: dict[str, JsonValue] = Field(default_factory=dict)
    loss: dict[str, JsonValue] = Field(default_factory=dict)
    trainer: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _of_a_policy(self) -> Self:
        for section, allowed in _OWN_SETTINGS.items():
            for key in getattr(self, section):
                if key not in allowed:
                    raise ValueError(
                        f"{section}.{key} is the run's; a policy's own can be {', '.join(allowed)}"
                    )
        return self

    def merged_into(self, name: str, section: Section) -> dict[str, Any]:
        """Return the values of the run's section `name` with these settings merged into them."""
        changes = getattr(self, name)
        # another engine or loss begins without the settings that only the run's own has
        dropped: set[str] = set()
        if "name" in changes:
            dropped = set(_OF_ONE_ENGINE) if name == "engine" else {"options"}
        return merged(section.model_dump(mode="json", exclude=dropped), changes)


class PolicyConfig(RateConfig):
    """What changes weights belongs to a policy."""

    lr: float = Field(0.0, ge=0)  # 0 only where nothing trains it
    model: str = ""  # Hugging Face folder
    chat_template: Literal["plain", "chatml"] | None = (
        None  # in place of the model's own, for a base model without one
    )
    # what its template is given, such as enable_thinking: false
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    remote: RemoteConfig | None = None  # in its place a frozen model behind an API
    tp: int = Field(1, ge=1)  # tensor-parallel ranks
    pp: int = Field(1, ge=1)  # pipeline-parallel ranks
    vpp: int = Field(1, ge=1)  # pipeline stages on each of them
    cp: int = Field(1, ge=1)  # context-parallel ranks
    dp: int = Field(1, ge=1)  # data-parallel ranks
    ep: int = Field(1, ge=1)  # of those, how many share out the experts of a layer
    sp: bool = False  # cut by sequence what tensor parallelism repeats
    distributed_optimizer: bool = (
        False  # each data-parallel rank keeps its part of the optimizer's state
    )
    overlap: bool = False  # exchange gradients, and with the distributed optimizer weights, while others are computed
    offload: bool = False  # give the trainer's memory away while the team acts
    host_moments: bool = (
        False  # keep Adam's moments in host memory, but for the weight that is being stepped
    )
    # what the backward pass computes again: nothing; norms' outputs and SwiGLU's products; or all of every layer
    recompute: Recompute = "none"
    layers: Literal["local", "te"] = (
        "local"  # whose linear layers: Megatron's own, or Transformer Engine's
    )
    attention: Literal["auto", "torch"] = (
        "auto"  # "auto": Triton's kernel where there is CUDA; "torch": its kernels
    )
    bf16: bool = False  # train in bfloat16 with float32 master weights; the embedded engine multiplies in it too
    lora: LoraConfig | None = None  # train adapters on the frozen model; None: train all weights
    share_base: bool = (
        False  # hold the frozen model once for all policies of this model that say so
    )
    max_in_flight: int | None = Field(
        None, ge=1
    )  # replies asked of its engine at once; None: as many as it decodes
    staleness: int | None = Field(
        None, ge=0
    )  # hand-overs its turns may be behind; None: trainer.staleness
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)  # of Adam
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)  # not of norms and biases
    clip_grad: float = Field(1.0, gt=0)
    spike_factor: float = Field(
        10.0, gt=1
    )  # times the running median from which a gradient norm is a spike
    skip_spikes: bool = (
        False  # leave the step out, as one with a gradient that is not finite always is
    )
    critic: CriticConfig | None = None  # for agents whose advantage is gae
    own: OwnConfig = OwnConfig()  # settings of engine, loss and trainer in place of the run's

    @property
    def ranks(self) -> int:
        """Processes that train it."""
        return self.tp * self.pp * self.cp * self.dp

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if bool(self.model) == (self.remote is not None):
            raise ValueError(
                "a policy has either a model (a folder) or a remote (an API); set one of them"
            )
        if self.remote is not None and self.max_in_flight is not None:
            raise ValueError(
                "max_in_flight bounds an engine of ours; of a remote model set remote.concurrency"
            )
        if self.remote is not None and (self.chat_template or self.chat_template_kwargs):
            raise ValueError(
                "chat_template and chat_template_kwargs are of a model folder; leave them out of a remote"
            )
        if self.remote is not None and self.own.engine.get("router_replay"):
            raise ValueError(
                "own.engine.router_replay: a remote model says nothing of its experts; leave it out"
            )
        if self.overlap and self.dp * self.cp == 1:
            raise ValueError(
                "overlap: one data-parallel rank exchanges nothing; use overlap: false, or dp: 2"
            )
        return self


# what the trainers of policies on one frozen model have in common
_OF_BASE = ("tp", "pp", "vpp", "cp", "dp", "ep", "sp", "bf16", "layers", "offload")


def sharing(policies: Mapping[str, PolicyConfig], name: str) -> tuple[str, ...]:
    """The policies that hold one frozen model together with policy `name`, which is one of them or the only one."""
    own = policies[name]
    if not own.share_base:
        return (name,)
    return tuple(other for other, p in policies.items() if p.share_base and p.model == own.model)


def check_sharing(policies: Mapping[str, PolicyConfig], trained: Collection[str]) -> None:
    """Refuse policies that are to hold their model with others and cannot.

    Raises:
        ValueError: which policy, and what is in the way.
    """
    for name, policy in policies.items():
        if not policy.share_base:
            continue
        where, others = f"policies.{name}: share_base", sharing(policies, name)
        if name not in trained or policy.lora is None:
            why = (
                "all of its weights are trained; give it a lora section"
                if name in trained
                else "nothing trains it"
            )
            raise ValueError(
                f"{where} is of trained adapters on a frozen model, and {why}, or leave share_base out"
            )
        if len(others) == 1:
            raise ValueError(
                f"{where}: no other policy with it has model {policy.model}; leave it out, or check model"
            )
        first = policies[others[0]]
        for key in _OF_BASE:
            if (mine := getattr(policy, key)) != (theirs := getattr(first, key)):
                raise ValueError(
                    f"{where} puts it on the ranks of '{others[0]}', whose {key} is {theirs} and not {mine}; make "
                    "them equal, or leave share_base out"
                )


class AlternateConfig(Section):
    """Policies trained in turn, each while the others play with the weights they have."""

    order: tuple[str, ...] = Field(min_length=2)  # policies
    steps: int = Field(1, ge=1)  # of each before the next


class TrainerConfig(Section):
    """The shape of a training run."""

    steps: int = Field(ge=1)
    tasks_per_step: int = Field(ge=1)
    group_size: int = Field(ge=1)  # trajectories per task, trees with branching
    branching: Branching | None = None
    oversample: float = Field(
        1.0, ge=1
    )  # times group_size that are started; the slowest are given up
    staleness: int = Field(
        0, ge=0
    )  # steps that collection may be ahead of training; 0 trains what it samples
    updates_per_step: int = Field(1, ge=1)  # optimizer steps, each on its share of a step's samples
    # turns of an optimizer step, in place of updates_per_step; drawn at random
    minibatch: int | None = Field(None, ge=1)
    passes: int = Field(1, ge=1)  # times that a step's samples are gone through (PPO's epochs)
    alternate: AlternateConfig | None = None  # None: every policy is trained in every step
    microbatch_tokens: int = Field(4096, ge=1)
    checkpoint_every: int = Field(10, ge=1)  # steps
    keep_checkpoints: int = Field(2, ge=1)  # the newest
    # steps of which trajectories stay, the newest; those since the newest checkpoint always do. None: all
    keep_trajectories: int | None = Field(None, ge=1)
    keep_best: int = Field(
        0, ge=0
    )  # also those with the highest validation accuracy; each is saved when it is found
    final: Literal["last", "best"] = "last"  # which weights are written as the finished policies
    resume: Literal["same", "changed"] = "same"  # changed: a run of another recipe is forked
    validate_every: int = Field(10, ge=1)  # steps
    validation_samples: int = Field(1, ge=1)  # trajectories per validation task
    max_advantage: float | None = Field(1e3, gt=0)  # |A| beyond which the run stops; None: never
    # steps from the start within which a turn must have an advantage, and in a row without a finite gradient
    signal_within: int | None = Field(10, ge=1)
    agreement: dict[Figure, PositiveFloat] = Field(
        default_factory=dict
    )  # bounds in place of the precision's

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.minibatch is not None and self.updates_per_step > 1:
            raise ValueError(
                "minibatch and updates_per_step both cut a step's samples; leave one of them out"
            )
        if self.final == "best" and not self.keep_best:
            raise ValueError("final 'best' needs a kept best: set trainer.keep_best to 1 or more")
        if self.updates_per_step > self.tasks_per_step:
            raise ValueError(
                f"updates_per_step {self.updates_per_step} is more than tasks_per_step {self.tasks_per_step}, and no "
                "task is cut; lower it, or set minibatch in its place"
            )
        return self


class BaseModelConfig(Section):
    """A small randomly initialised Qwen2 and the size of its tokenizer."""

    layers: int = Field(ge=1)
    hidden: int = Field(ge=8)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    ffn: int = Field(ge=8)
    vocab: int = Field(ge=300)  # 256 bytes and the special tokens are always in it
    positions: int = Field(1024, ge=16)
    tokens: Literal["words", "phrases"] = (
        "words"  # the largest text that may become one token; digits never join
    )

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads}: "
                "heads must divide hidden, and kv_heads must divide heads"
            )
        return self


class ColdStartConfig(Section):
    """Supervised fine-tuning on generated demonstrations, until the team is legal but far from its ceiling."""

    base: BaseModelConfig
    options: dict[str, Any] = Field(default_factory=dict)  # of the generator's demonstrations
    lr: float = Field(gt=0)
    warmup_steps: int = Field(50, ge=0)
    batch: int = Field(64, ge=1)  # demonstrations per step
    max_steps: int = Field(ge=1)
    check_every: int = Field(50, ge=1)  # steps between two measurements of the team
    first_check: int = Field(0, ge=0)  # no measurement before this step
    check_tasks: int = Field(64, ge=1)  # validation tasks of one measurement
    stop_legal: float = Field(0.9, ge=0, le=1)  # stop when this share of turns is well-formed ...
    stop_accuracy: float = Field(0.3, ge=0, le=1)  # ... and this share of trajectories succeeds


class EvaluationConfig(Section):
    """How a team is measured: on the test tasks, and but for `samples` on the validation tasks too."""

    samples: int = Field(4, ge=1)  # k of avg@k, pass@k and maj@k
    temperature: float | None = Field(None, ge=0)  # of every agent; None keeps each agent's own
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    retries: int = Field(2, ge=0)  # of a trajectory that failed, with the same seeds
    max_failed: float = Field(
        0.05, ge=0, le=1
    )  # share of trajectories that may fail for good, of an evaluation
    in_flight: int | None = Field(
        None, ge=1
    )  # trajectories at a time; None: two for each that the engines decode

    @property
    def sampling(self) -> dict[str, float]:
        """What replaces every agent's own sampling."""
        return self.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)


class TrackingConfig(Section):
    """Where metrics go besides the run folder."""

    uri: str  # of MLflow's tracking store
    experiment: str
    traces: int = Field(
        2, ge=0
    )  # trajectories of each step with a validation that go there as traces
    # of MLflow's runs, by names that it takes; a suite adds its name, and a paper's tables
    tags: dict[Annotated[str, Field(pattern=r"^[\w.\-:/ ]+$", max_length=250)], str] = Field(
        default_factory=dict
    )
    also: tuple[
        Literal["tensorboard", "wandb"], ...
    ] = ()  # further trackers of a training's metrics

    @field_validator("uri")
    @classmethod
    def _without_password(cls, uri: str) -> str:
        parts = urlsplit(uri)
        http = parts.scheme.startswith("http")
        given = re.search("(?i)(password|passwd|pwd|token|secret|api_?key)=", unquote(parts.query))
        if given or parts.password or (parts.username and http):
            raise ValueError(
                "may hold no password, which config.yaml and MLflow would show; see docs/mlflow.md"
            )
        if (
            not uri
            or parts.scheme.partition("+")[0] not in _STORES
            or (http and not parts.hostname)
        ):
            raise ValueError(
                f"'{uri}' is no store of MLflow; expected http(s)://HOST:PORT or sqlite:///FILE"
            )
        return uri


_STORES = {
    "",
    "file",
    "http",
    "https",
    "sqlite",
    "postgresql",
    "mysql",
    "mssql",
    "databricks",
    "uc",
    "databricks-uc",
}
_STORES |= {entry.name for entry in entry_points(group="mlflow.tracking_store")}
