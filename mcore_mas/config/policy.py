"""Section of a config about a policy: its model, parallel layout, optimizer, adapters and critic."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, JsonValue, field_validator, model_validator

from rollout.base.nested import merged
from rollout.base.section import Section
from rollout.engines.config import SERVER_SETTINGS
from rollout.engines.remote.config import RemoteConfig
from rollout.models.layout import Fp8Format, Fp8Recipe, Projection, Recompute

# Settings whose meaning depends on the kind of engine; a policy that names its own engine does not inherit them.
_ENGINE_CHOICE_SETTINGS = (
    "transport",
    "device",
    "python",
    "urls",
    "members",
    "key_file",
    "options",
    "environment",
    "adapters",
)
# Settings of the run's sections that a policy may replace under `overrides`.
_OVERRIDABLE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "engine": (
        "name",
        "slots",
        "max_length",
        "overlong_prompts",
        "replicas",
        "tp",
        "router_replay",
        "grammar",
        *_ENGINE_CHOICE_SETTINGS,
    ),
    "loss": ("name", "options", "aggregation", "norm", "entropy", "kl", "correction"),
    "trainer": ("microbatch_tokens", "updates_per_step", "minibatch", "passes"),
}
# Settings in which the policies on one frozen model must agree.
_SHARED_BASE_SETTINGS = ("tp", "pp", "vpp", "cp", "dp", "ep", "sp", "bf16", "layers", "offload")

_Decay = Annotated[float, Field(ge=0, lt=1)]


class RateConfig(Section):
    """The learning rate of an optimizer."""

    lr: float = Field(gt=0)
    # Updates of linear warm-up; training steps if trainer.minibatch is set.
    warmup_steps: int = Field(0, ge=0)
    # The schedule after the warm-up.
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    # The rate at which the schedule ends.
    min_lr: float = Field(0.0, ge=0)
    # Updates until the schedule ends, including the warm-up, in the unit of warmup_steps; None: all updates of the run.
    decay_steps: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_min_lr(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(
                f"min_lr {self.min_lr} is above lr {self.lr}, but a schedule only lowers the rate; "
                "lower min_lr, or raise lr"
            )
        return self


class LoraConfig(Section):
    """Low-rank adapters on a frozen model: W + alpha / rank · B A (Hu et al. 2021, arXiv 2106.09685).

    There is no dropout, because engine and trainer must compute the same function.
    """

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    # Projections of every layer that have an adapter.
    targets: tuple[Projection, ...] = Field(get_args(Projection), min_length=1)
    # Folder in PEFT's format to start from; None: A is random and B zero.
    adapter: str | None = None

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


class CriticConfig(RateConfig):
    """A critic: a value head on the policy's `model`.

    The critic trains a copy of this model, or adapters of its own if the policy has `lora`.
    """

    # Clip range of PPO's value loss in units of the reward, around the values at the start of the training step.
    clip: float = Field(0.2, gt=0)
    # Number of training steps at the start of the run in which only the critic is trained, not its policy.
    head_start: int = Field(0, ge=0)


class TeacherConfig(Section):
    """On-policy distillation: a teacher scores each token that the policy samples."""

    # The teacher, another policy of the run: frozen or trained, a folder or a remote model. It needs no agent.
    policy: str
    # Factor of log ρ(token) - log π(token), in nats, which is added to the token's advantage (ρ: the teacher).
    coef: float = Field(1.0, gt=0)
    # Learn from the teacher alone: advantages of the reward are left out, and rewards are only measured.
    alone: bool = False
    # System message that only the teacher reads, before the student's prompt; {answer} is the task's first accepted
    # answer. With a context, a policy may be its own teacher.
    context: str | None = None

    @field_validator("context")
    @classmethod
    def _check_context(cls, context: str | None) -> str | None:
        if context is not None:
            try:
                context.format(answer="")
            except (LookupError, ValueError, AttributeError, TypeError) as error:
                raise ValueError(
                    f"not a template ({type(error).__name__}: {error}); expected a text whose only name in braces is "
                    "{answer}; a brace that is text is written twice"
                ) from None
        return context


class PolicyOverrides(Section):
    """Settings of a policy in place of the run's, by the run's sections; mappings are merged key by key."""

    engine: dict[str, JsonValue] = Field(default_factory=dict)
    loss: dict[str, JsonValue] = Field(default_factory=dict)
    trainer: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        for section, allowed in _OVERRIDABLE_SETTINGS.items():
            for key in getattr(self, section):
                if key not in allowed:
                    raise ValueError(
                        f"{section}.{key} cannot be overridden by a policy; expected {', '.join(allowed)}"
                    )
        return self

    def merged_into(self, section_name: str, section: Section) -> dict[str, Any]:
        """Return the values of a section of the run with the policy's settings merged into them.

        If the policy names its own engine or loss, it does not inherit the settings that depend on this choice.
        """
        changes = getattr(self, section_name)
        dropped: set[str] = set()
        if "name" in changes:
            dropped = _uninherited_settings(section_name, changes["name"])
        return merged(section.model_dump(mode="json", exclude=dropped), changes)


def _uninherited_settings(section_name: str, name: JsonValue) -> set[str]:
    """Return the settings of the run's engine or loss that do not apply to a policy which names its own.

    Args:
        section_name: "engine" or "loss".
        name: name of the policy's engine or loss.
    """
    if section_name == "loss":
        return {"options"}
    # SGLang inherits the remaining SERVER_SETTINGS, such as `tp` and `timeout_s`. Other engines refuse them.
    if name == "sglang":
        return set(_ENGINE_CHOICE_SETTINGS)
    return {*_ENGINE_CHOICE_SETTINGS, *SERVER_SETTINGS}


class PolicyConfig(RateConfig):
    """A policy: its model, and how it is served and trained."""

    # Learning rate; 0 is allowed only if nothing trains the policy.
    lr: float = Field(0.0, ge=0)
    # Folder of the model in Hugging Face's format, or the Hub's id of a model that was downloaded.
    model: str = ""
    # Name of a chat template, for a model that has none or whose own cannot be used.
    chat_template: Literal["plain", "chatml"] | None = None
    # Arguments of the template, such as enable_thinking: false.
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    # A frozen model behind an API, in place of `model`.
    remote: RemoteConfig | None = None

    # Ranks of tensor parallelism.
    tp: int = Field(1, ge=1)
    # Ranks of pipeline parallelism.
    pp: int = Field(1, ge=1)
    # Virtual pipeline stages on each rank of pipeline parallelism.
    vpp: int = Field(1, ge=1)
    # Ranks of context parallelism.
    cp: int = Field(1, ge=1)
    # Ranks of data parallelism.
    dp: int = Field(1, ge=1)
    # Ranks of expert parallelism, out of the data- and context-parallel ones.
    ep: int = Field(1, ge=1)
    # Sequence parallelism: the activations that tensor parallelism replicates are split along the sequence.
    sp: bool = False

    # Shard the optimizer state over the data-parallel ranks.
    distributed_optimizer: bool = False
    # Overlap the reduction of gradients, and the distributed optimizer's all-gather of weights, with computation;
    # None: if there are several data- or context-parallel ranks.
    overlap: bool | None = None
    # Free the trainer's GPU memory while the team acts.
    offload: bool = False
    # Keep Adam's moments in host memory, except those of the weight that is being updated.
    host_moments: bool = False
    # Activations that the backward pass computes again. "selective": those of norms and SwiGLU; "full": all of every
    # layer. None: chosen by the plan (cluster.gpus), or "none" without a plan.
    recompute: Recompute | None = None
    # Transformer layers. "local": without Transformer Engine; "te": with its linear layers, norms and experts, and with
    # its attention in micro-batches whose sequences share no tokens.
    layers: Literal["local", "te"] = "local"
    # Products of the layers in FP8; needs layers: te and bf16. "hybrid": gradients have more exponent bits.
    fp8: Fp8Format | None = None
    # Scales in FP8. "tensorwise": one for each tensor; "blockwise": one for each block of 128 numbers; "mxfp8", on
    # Blackwell: one for each 32 numbers.
    fp8_recipe: Fp8Recipe = "tensorwise"
    # Kernels of the attention. "auto": the Triton kernel on CUDA; "torch": torch's kernels.
    attention: Literal["auto", "torch"] = "auto"
    # Train in bfloat16 with float32 master weights; the embedded engine then multiplies in bfloat16 too.
    bf16: bool = False
    # Train adapters on the frozen model; None: train all weights.
    lora: LoraConfig | None = None
    # Hold the frozen model once for all policies of the same model with this setting.
    share_base: bool = False

    # Concurrent requests to the policy's engine; None: as many as it decodes at a time.
    max_in_flight: int | None = Field(None, ge=1)
    # Weight syncs by which turns may be behind when they train; None: trainer.staleness.
    staleness: int | None = Field(None, ge=0)

    # Decay rates of Adam's two moments.
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    # Decoupled weight decay of all weights but norms and biases.
    weight_decay: float = Field(0.0, ge=0)
    # Norm to which a larger gradient is scaled down.
    clip_grad: float = Field(1.0, gt=0)
    # Multiple of the running median above which a gradient norm counts as a spike.
    spike_factor: float = Field(10.0, gt=1)
    # Skip the update at a spike, as always at a gradient that is not finite.
    skip_spikes: bool = False

    # Critic of the policy, for agents whose advantage is gae; None: the policy has none.
    critic: CriticConfig | None = None
    # Teacher of the policy, for on-policy distillation; None: the policy has none.
    teacher: TeacherConfig | None = None
    # Settings of engine, loss and trainer in place of the run's.
    overrides: PolicyOverrides = PolicyOverrides()

    @property
    def ranks(self) -> int:
        """Number of processes that train the policy."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def recomputation(self) -> Recompute:
        """Activations that the backward pass computes again; "none" if `recompute` is not set."""
        return self.recompute or "none"

    @property
    def overlaps(self) -> bool:
        """Value of `overlap`; if it is None, True if there are several data- or context-parallel ranks."""
        if self.overlap is not None:
            return self.overlap
        return self.dp * self.cp > 1

    @model_validator(mode="after")
    def _check_settings_of_policy(self) -> Self:
        """Check that either model or remote is set, that fp8 has its layers, and that there is something to overlap."""
        if bool(self.model) == (self.remote is not None):
            raise ValueError(
                "a policy has either a model (a folder) or a remote (an API); set one of them"
            )
        if self.remote is not None:
            self._check_remote()
        if self.fp8 is not None and (self.layers != "te" or not self.bf16):
            raise ValueError(
                f"fp8: {self.fp8} needs Transformer Engine's layers and bfloat16; set layers: te and bf16: true"
            )
        if self.overlap and self.dp * self.cp == 1:
            raise ValueError(
                "overlap: one data-parallel rank exchanges nothing; leave overlap out, or use dp: 2"
            )
        return self

    def _check_remote(self) -> None:
        """Refuse `max_in_flight`, settings of the chat template, and `router_replay` beside `remote`."""
        if self.max_in_flight is not None:
            raise ValueError(
                "max_in_flight bounds the requests to an engine; for a remote model set remote.concurrency"
            )
        if self.chat_template or self.chat_template_kwargs:
            raise ValueError(
                "chat_template and chat_template_kwargs apply to a model folder; leave them out for a remote"
            )
        if self.overrides.engine.get("router_replay"):
            raise ValueError(
                "overrides.engine.router_replay: a remote model does not report its experts; leave it out"
            )


def policies_on_base(policies: Mapping[str, PolicyConfig], name: str) -> tuple[str, ...]:
    """Return policy `name` and those that share its frozen model, in the order of the config."""
    policy = policies[name]
    if not policy.share_base:
        return (name,)
    return tuple(
        other
        for other, config in policies.items()
        if config.share_base and config.model == policy.model
    )


def check_shared_bases(policies: Mapping[str, PolicyConfig], trained: Collection[str]) -> None:
    """Refuse policies that cannot hold their frozen model together with others.

    Raises:
        ValueError: a policy with `share_base` is not trained, trains all weights, is alone on its model, or has
            another value of one of `_SHARED_BASE_SETTINGS` than the first policy on it.
    """
    for name, policy in policies.items():
        if not policy.share_base:
            continue
        key = f"policies.{name}: share_base"
        if name not in trained:
            raise ValueError(
                f"{key} is for policies that train adapters on a frozen model, and nothing trains this policy; leave "
                "share_base out"
            )
        if policy.lora is None:
            raise ValueError(
                f"{key} is for policies that train adapters on a frozen model, and this policy trains all weights; "
                f"add policies.{name}.lora, or leave share_base out"
            )
        group = policies_on_base(policies, name)
        if len(group) == 1:
            raise ValueError(
                f"{key}: no other policy with share_base has model {policy.model}; leave share_base out, or correct "
                "the model"
            )
        first = policies[group[0]]
        for setting in _SHARED_BASE_SETTINGS:
            value = getattr(policy, setting)
            expected = getattr(first, setting)
            if value != expected:
                raise ValueError(
                    f"{key} puts it on the ranks of '{group[0]}', whose {setting} is {expected} and not {value}; "
                    "make them equal, or leave share_base out"
                )
