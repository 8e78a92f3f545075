"""A Hugging Face model trained by plain torch: what every Megatron layout must reproduce."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

from mcore_mas.credit.samples import Sample
from tests.support import lora

BASE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 101,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 2.0,  # not the released models' 1, 4 and 8192, which Megatron takes for granted
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 64,
}
MIXTURES = ("qwen3_moe",)
MIXTURE = {  # the second layer is dense
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
FAMILIES = {
    "qwen2": lambda **sizes: transformers.Qwen2Config(
        **BASE | sizes, tie_word_embeddings=True, rope_parameters=DEFAULT_ROPE
    ),
    "qwen3": lambda **sizes: transformers.Qwen3Config(
        **BASE | sizes, head_dim=32, tie_word_embeddings=False, rope_parameters=DEFAULT_ROPE
    ),
    "qwen3_moe": lambda **sizes: transformers.Qwen3MoeConfig(
        **BASE | MIXTURE | sizes,
        head_dim=32,
        tie_word_embeddings=False,
        rope_parameters=DEFAULT_ROPE,
    ),
    "llama": lambda **sizes: transformers.LlamaConfig(
        **BASE | sizes, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE
    ),
}


def make_model(
    family: str, folder: Path, *, critic: bool = False, layers: int = 2, **sizes: Any
) -> transformers.PreTrainedModel:
    """A tiny random model with non-trivial norms and biases, saved to `folder`; a critic has one label.

    `sizes` take the place of those in BASE and MIXTURE.
    """
    torch.manual_seed(0)
    config = FAMILIES[family](num_hidden_layers=layers, **sizes)
    config._experts_implementation = (
        "eager"  # the plain definition, not the fastest kernel there is
    )
    config.num_labels = 1 if critic else 2
    kind = (
        transformers.AutoModelForSequenceClassification
        if critic
        else transformers.AutoModelForCausalLM
    )
    model = kind.from_config(config).float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            else:
                parameter.mul_(
                    2.0 if family in MIXTURES else 3.0
                )  # experts chosen more sharply lose digits to it
    model.save_pretrained(folder)
    return model


def on_disk(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What transformers writes a parameter as: the stack of a layer's experts by expert, all else as it is."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield name, tensor
        return
    stack = name[: name.rindex(".")]
    for expert, matrix in enumerate(tensor):
        parts = (
            {"down": matrix}
            if "down" in name
            else dict(zip(("gate", "up"), matrix.chunk(2), strict=True))
        )
        yield from (
            (f"{stack}.{expert}.{which}_proj.weight", part) for which, part in parts.items()
        )


def tensors(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's weights as they are on disk, adapters merged, and the adapters by PEFT name."""
    return {
        n: part.clone()
        for name, whole in lora.tensors_of(model).items()
        for n, part in on_disk(name, whole)
    }


def make_samples() -> list[Sample]:
    """Two agents; a prompt with three ragged replies, two prompts with one reply, a dialogue with untrained tokens."""
    generator = torch.Generator().manual_seed(2)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 101, (n,), generator=generator).tolist())

    prompt = ids(7)
    rows = [
        ("a", prompt, ids(3)),
        ("a", prompt, ids(6)),
        ("a", prompt, ids(1)),
        ("a", ids(4), ids(5)),
    ]
    rows += [("b", ids(9), ids(4)), ("b", (), ids(8))]
    samples = []
    for i, (agent, head, reply) in enumerate(rows):
        trained = tuple(j % 3 != 0 for j in range(len(reply))) if not head else None
        weight = (i + 1) / 100
        samples.append(
            Sample(
                policy="p",
                agent=agent,
                task="t",
                trajectory=str(i),
                turn=0,
                prompt_ids=head,
                completion_ids=reply,
                trained=trained,
                temperature=0.7 if agent == "b" else 1.0,
                weight=weight,
            )
        )
    return samples


def make_deep_samples() -> list[Sample]:
    """Two agents' trees three segments deep: ragged replies, a single token, turns that go on from others, twins."""
    generator = torch.Generator().manual_seed(4)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 101, (n,), generator=generator).tolist())

    rows = []
    for agent in ("a", "b"):
        stem = ids(20)
        first, second = ids(9), ids(12)
        limbs = [
            stem + first + ids(4),
            stem + second + ids(2),
        ]  # what was said and observed after the stem
        rows += [
            (agent, stem, first),
            (agent, stem, second),
            (agent, stem, ids(1)),
            (agent, stem, first),
        ]
        rows += [(agent, limb, ids(n)) for limb in limbs for n in (3, 7, 2)]
        rows += [(agent, limbs[0] + rows[-4][2], ids(5)), (agent, ids(6), ids(3))]
    return [
        Sample(
            policy="p",
            agent=agent,
            task="t",
            trajectory=str(number),
            turn=0,
            prompt_ids=prompt,
            completion_ids=reply,
            trained=tuple(j % 3 != 1 for j in range(len(reply))) if number % 4 == 1 else None,
            temperature=0.7 if agent == "b" else 1.0,
            weight=(number + 1) / 200,
        )
        for number, (agent, prompt, reply) in enumerate(rows)
    ]


def loss_of(model: transformers.PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Σ weight · −log p(token) over the trained tokens of one sample, computed alone and unpacked."""
    ids = torch.tensor(sample.prompt_ids + sample.completion_ids)
    logits = model(input_ids=ids[None]).logits[0] / sample.temperature
    logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[1:, None])[:, 0]
    trained = sample.trained or (True,) * len(sample.completion_ids)
    mask = torch.tensor(((False,) * len(sample.prompt_ids) + trained)[1:])
    return -(logprobs * mask).sum() * sample.weight


def make_critic_samples() -> list[Sample]:
    """The same samples with old values and returns on every token, some too far apart for the clip of 0.2."""
    generator = torch.Generator().manual_seed(3)

    def column(n: int) -> tuple[float, ...]:
        return tuple((torch.randn(n, generator=generator) * 0.5).tolist())

    return [
        replace(
            sample,
            values=column(len(sample.completion_ids)),
            returns=column(len(sample.completion_ids)),
        )
        for sample in make_samples()
    ]


def logprobs_of(model: transformers.PreTrainedModel, sample: Sample) -> torch.Tensor:
    """[C] log-probabilities of a sample's completion, NaN for a first token without anything before it."""
    ids = torch.tensor(sample.prompt_ids + sample.completion_ids)
    logits = model(input_ids=ids[None]).logits[0] / sample.temperature
    logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[1:, None])[:, 0]
    return torch.cat([torch.full((1,), float("nan")), logprobs])[len(sample.prompt_ids) :]


def values_of(critic: transformers.PreTrainedModel, sample: Sample) -> torch.Tensor:
    """[C] values before each token of a sample's completion, NaN for a first token without anything before it."""
    ids = torch.tensor(sample.prompt_ids + sample.completion_ids)
    hidden = critic.model(input_ids=ids[None]).last_hidden_state[0]
    values = (hidden @ critic.score.weight.t())[:, 0]
    return torch.cat([torch.full((1,), float("nan")), values[:-1]])[len(sample.prompt_ids) :]


def value_loss_of(critic: transformers.PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Σ weight · ½ max((v − R)², (clip(v, old ± 0.2) − R)²) over the trained tokens of one sample."""
    trained = torch.tensor(sample.trained or (True,) * len(sample.completion_ids))
    v = values_of(critic, sample)[trained]
    old, target = (torch.tensor(column)[trained] for column in (sample.values, sample.returns))
    clipped = torch.minimum(torch.maximum(v, old - 0.2), old + 0.2)
    return 0.5 * torch.maximum((v - target) ** 2, (clipped - target) ** 2).sum() * sample.weight


def train(
    model: transformers.PreTrainedModel,
    samples: list[Sample],
    steps: int,
    lr: float,
    loss_of: Callable[[transformers.PreTrainedModel, Sample], torch.Tensor] = loss_of,
) -> list[dict]:
    """Plain AdamW with clipping at 1; per step the loss, the gradient norm (also per agent) and the parameters."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0
    )
    history = []
    for _ in range(steps):
        row: dict = {"agent_norm": {}, "loss": 0.0}
        total: dict[str, torch.Tensor] = {}
        for agent in sorted({s.agent for s in samples}):
            model.zero_grad()
            loss = sum(loss_of(model, s) for s in samples if s.agent == agent)
            loss.backward()
            own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            row["agent_norm"][agent] = float(
                torch.stack([gradient.norm() for gradient in own.values()]).norm()
            )
            row["loss"] += float(loss.detach())
            total = {name: gradient + total.get(name, 0.0) for name, gradient in own.items()}
        for name, gradient in total.items():
            model.get_parameter(name).grad = gradient
        row["norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        row["gradients"] = {
            n: part.clone()
            for name, p in model.named_parameters()
            if p.requires_grad
            for n, part in on_disk(lora.name_of(name), p.grad)
        }
        row["parameters"] = tensors(model)
        history.append(row)
    return history


class _Wide(TorchFunctionMode):
    """What asks for float32 gets float64."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            return args[0].double()
        return func(
            *map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()}
        )


def to_double(model: transformers.PreTrainedModel) -> None:
    """Have a model compute in float64, its norms and routers too, which cast to float32 whatever the model's type is.

    Rotary angles stay float32: they are part of what a model is.
    """
    model.double()
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "Router")):
            module.forward = functools.partial(_widely, module.forward)


def _widely(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Wide():
        return forward(*args, **kwargs)
