"""Training of a Hugging Face model in plain torch, which every Megatron layout must reproduce."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
    # The released models have 1, 4 and 8192 in the next three lines, which are Megatron's defaults.
    # Other values show that the configuration is read.
    "low_freq_factor": 2.0,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 64,
}
MIXTURES = ("qwen3_moe",)
# The second layer is dense.
MIXTURE = {
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
    """Return a tiny random model with non-trivial norms and biases, and save it to `folder`.

    Args:
        critic: True for a model with a value head.
        sizes: replacements of those in BASE and MIXTURE.
    """
    torch.manual_seed(0)
    config = FAMILIES[family](num_hidden_layers=layers, **sizes)
    config._experts_implementation = "eager"  # the plain definition instead of the fastest kernel
    if critic:
        config.num_labels = 1
        model_class = transformers.AutoModelForSequenceClassification
    else:
        config.num_labels = 2
        model_class = transformers.AutoModelForCausalLM
    model = model_class.from_config(config).float()

    # The more sharply experts are chosen, the more digits are lost.
    weight_scale = 2.0 if family in MIXTURES else 3.0
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            else:
                parameter.mul_(weight_scale)
    model.save_pretrained(folder)
    return model


def on_disk(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (name, tensor) pairs that transformers writes for a parameter.

    The stacked experts of a layer are written one by one; other parameters stay as they are.
    """
    prefix = name.rpartition(".")[0]
    if name.endswith("experts.down_proj"):
        for expert, down in enumerate(tensor):
            yield f"{prefix}.{expert}.down_proj.weight", down
    elif name.endswith("experts.gate_up_proj"):
        for expert, gate_up in enumerate(tensor):
            gate, up = gate_up.chunk(2)
            yield f"{prefix}.{expert}.gate_proj.weight", gate
            yield f"{prefix}.{expert}.up_proj.weight", up
    else:
        yield name, tensor


def tensors(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights by their names on disk, adapters merged, and the adapters by PEFT name."""
    on_disk_tensors = {}
    for name, whole in lora.tensors_of(model).items():
        for file_name, part in on_disk(name, whole):
            on_disk_tensors[file_name] = part.clone()
    return on_disk_tensors


def make_samples() -> list[Sample]:
    """Return samples of two agents.

    Agent a has a prompt with three replies of different lengths, and a prompt with one. Agent b has
    a prompt with one reply, and a dialogue without a prompt, some of whose tokens are not trained.
    """
    ids = _random_ids(seed=2)
    prompt = ids(7)
    rows = [
        ("a", prompt, ids(3)),
        ("a", prompt, ids(6)),
        ("a", prompt, ids(1)),
        ("a", ids(4), ids(5)),
        ("b", ids(9), ids(4)),
        ("b", (), ids(8)),
    ]
    samples = []
    for number, (agent, head, reply) in enumerate(rows):
        mask = None if head else tuple(position % 3 != 0 for position in range(len(reply)))
        samples.append(
            _make_sample(agent, number, head, reply, trained=mask, weight=(number + 1) / 100)
        )
    return samples


def with_random_routing(samples: Sequence[Sample], experts: int, layers: int) -> list[Sample]:
    """Give all samples but the fourth two random experts of each token, as two bytes each."""
    random = np.random.default_rng(0)
    result = []
    for number, sample in enumerate(samples):
        if number != 3:
            tokens = len(sample.prompt_ids) + len(sample.completion_ids) - 1
            choices = [random.permuted(np.arange(experts))[:2] for _ in range(layers * tokens)]
            sample = replace(sample, routing=np.stack(choices).astype("<u2").tobytes())
        result.append(sample)
    return result


def make_deep_samples() -> list[Sample]:
    """Return samples that are prefix trees of two agents, three segments deep.

    They have replies of different lengths, a reply of one token, turns that continue others, and
    two equal samples.
    """
    ids = _random_ids(seed=4)
    rows = []
    for agent in ("a", "b"):
        stem = ids(20)
        first = ids(9)
        second = ids(12)
        # dialogues: the stem, a reply, and the observation after the reply
        dialogues = [stem + first + ids(4), stem + second + ids(2)]
        rows += [
            (agent, stem, first),
            (agent, stem, second),
            (agent, stem, ids(1)),
            (agent, stem, first),
        ]
        for dialogue in dialogues:
            rows += [(agent, dialogue, ids(length)) for length in (3, 7, 2)]
        last_reply_to_first = rows[-4][2]
        rows.append((agent, dialogues[0] + last_reply_to_first, ids(5)))
        rows.append((agent, ids(6), ids(3)))

    samples = []
    for number, (agent, prompt, reply) in enumerate(rows):
        mask = None
        if number % 4 == 1:
            mask = tuple(position % 3 != 1 for position in range(len(reply)))
        samples.append(
            _make_sample(agent, number, prompt, reply, trained=mask, weight=(number + 1) / 200)
        )
    return samples


def _random_ids(seed: int) -> Callable[[int], tuple[int, ...]]:
    """Return a function that draws so many random token ids."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 101, (count,), generator=generator).tolist())

    return ids


def _make_sample(
    agent: str,
    number: int,
    prompt_ids: tuple[int, ...],
    completion_ids: tuple[int, ...],
    *,
    trained: tuple[bool, ...] | None,
    weight: float,
) -> Sample:
    return Sample(
        policy="p",
        agent=agent,
        task="t",
        trajectory=str(number),
        turn=0,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        trained=trained,
        temperature=0.7 if agent == "b" else 1.0,
        weight=weight,
    )


def loss_of(model: transformers.PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Return Σ weight · −log p(token) over the trained tokens of one sample, which is not packed."""
    ids = torch.tensor(sample.prompt_ids + sample.completion_ids)
    logits = model(input_ids=ids[None]).logits[0] / sample.temperature
    logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[1:, None])[:, 0]
    trained = sample.trained or (True,) * len(sample.completion_ids)
    mask = torch.tensor(((False,) * len(sample.prompt_ids) + trained)[1:])
    return -(logprobs * mask).sum() * sample.weight


def make_critic_samples() -> list[Sample]:
    """Return `make_samples()` with old values and returns for every token.

    Some differ by more than the clip of 0.2.
    """
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
    """Return the [C] log-probabilities of a sample's completion.

    The first token of a sample without a prompt has none, and gets NaN.
    """
    ids = torch.tensor(sample.prompt_ids + sample.completion_ids)
    logits = model(input_ids=ids[None]).logits[0] / sample.temperature
    logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[1:, None])[:, 0]
    return torch.cat([torch.full((1,), float("nan")), logprobs])[len(sample.prompt_ids) :]


def values_of(critic: transformers.PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Return the [C] values before each token of a sample's completion.

    The first token of a sample without a prompt has none, and gets NaN.
    """
    ids = torch.tensor(sample.prompt_ids + sample.completion_ids)
    hidden = critic.model(input_ids=ids[None]).last_hidden_state[0]
    values = (hidden @ critic.score.weight.t())[:, 0]
    return torch.cat([torch.full((1,), float("nan")), values[:-1]])[len(sample.prompt_ids) :]


def value_loss_of(critic: transformers.PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Return Σ weight · ½ max((v − R)², (clip(v, old ± 0.2) − R)²) over a sample's trained tokens."""
    trained = torch.tensor(sample.trained or (True,) * len(sample.completion_ids))
    values = values_of(critic, sample)[trained]
    old_values = torch.tensor(sample.values)[trained]
    returns = torch.tensor(sample.returns)[trained]
    clipped = torch.minimum(torch.maximum(values, old_values - 0.2), old_values + 0.2)
    errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * errors.sum() * sample.weight


def train(
    model: transformers.PreTrainedModel,
    samples: list[Sample],
    steps: int,
    lr: float,
    loss_of: Callable[[transformers.PreTrainedModel, Sample], torch.Tensor] = loss_of,
    balance: Mapping[str, float] | None = None,
) -> list[dict]:
    """Train with plain AdamW and gradient clipping at 1.

    Args:
        balance: weight of each agent. The gradients of the agents are rescaled so that their norms
            are as these weights and have the same sum as before; None: they are not rescaled.

    Returns:
        For each step: `loss`, `norm` of the gradients, `agent_norm` by agent, `gradients` after
        clipping, and `parameters`.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0
    )
    history = []
    for _ in range(steps):
        row: dict = {"agent_norm": {}, "loss": 0.0}
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for agent in sorted({sample.agent for sample in samples}):
            model.zero_grad()
            loss = sum(loss_of(model, sample) for sample in samples if sample.agent == agent)
            loss.backward()
            parts[agent] = {
                name: parameter.grad
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
            norms = torch.stack([gradient.norm() for gradient in parts[agent].values()])
            row["agent_norm"][agent] = float(norms.norm())
            row["loss"] += float(loss.detach())
        total: dict[str, torch.Tensor] = {}
        for agent, gradients in parts.items():
            factor = 1.0
            if balance is not None:
                share = balance[agent] / sum(balance.values())
                factor = share * sum(row["agent_norm"].values()) / row["agent_norm"][agent]
            for name, gradient in gradients.items():
                total[name] = factor * gradient + total.get(name, 0.0)
        for name, gradient in total.items():
            model.get_parameter(name).grad = gradient
        row["norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        row["gradients"] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                for file_name, part in on_disk(lora.name_of(name), parameter.grad):
                    row["gradients"][file_name] = part.clone()
        row["parameters"] = tensors(model)
        history.append(row)
    return history


class _Float64(TorchFunctionMode):
    """Mode in which functions compute in float64 where they ask for float32."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            return args[0].double()
        wide_args = [widen(value) for value in args]
        wide_kwargs = {name: widen(value) for name, value in (kwargs or {}).items()}
        return func(*wide_args, **wide_kwargs)


def to_double(model: transformers.PreTrainedModel) -> None:
    """Make a model compute in float64.

    Its norms and routers compute in float64 too, although their code casts to float32. Rotary
    angles stay float32, because they are part of the model's definition.
    """
    model.double()
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "Router")):
            module.forward = functools.partial(_forward_in_float64, module.forward)


def _forward_in_float64(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Float64():
        return forward(*args, **kwargs)
