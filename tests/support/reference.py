"""A Hugging Face model trained by plain torch: what every Megatron layout must reproduce."""

from pathlib import Path

import torch
import transformers

from mcore_mas.samples import Sample

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
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
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {
    "qwen2": lambda: transformers.Qwen2Config(**BASE, tie_word_embeddings=True, rope_parameters=DEFAULT_ROPE),
    "qwen3": lambda: transformers.Qwen3Config(
        **BASE, head_dim=32, tie_word_embeddings=False, rope_parameters=DEFAULT_ROPE
    ),
    "llama": lambda: transformers.LlamaConfig(**BASE, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
}


def make_model(family: str, folder: Path) -> transformers.PreTrainedModel:
    """A tiny random model with non-trivial norms and biases, saved to `folder`."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            else:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return model


def make_samples() -> list[Sample]:
    """Two agents; a prompt with three ragged replies, two prompts with one reply, a dialogue with untrained tokens."""
    generator = torch.Generator().manual_seed(2)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 101, (n,), generator=generator).tolist())

    prompt = ids(7)
    rows = [("a", prompt, ids(3)), ("a", prompt, ids(6)), ("a", prompt, ids(1)), ("a", ids(4), ids(5))]
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


def loss_of(model: transformers.PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Σ weight · −log p(token) over the trained tokens of one sample, computed alone and unpacked."""
    ids = torch.tensor(sample.prompt_ids + sample.completion_ids)
    logits = model(input_ids=ids[None]).logits[0].float() / sample.temperature
    logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[1:, None])[:, 0]
    trained = sample.trained or (True,) * len(sample.completion_ids)
    mask = torch.tensor(((False,) * len(sample.prompt_ids) + trained)[1:])
    return -(logprobs * mask).sum() * sample.weight


def train(model: transformers.PreTrainedModel, samples: list[Sample], steps: int, lr: float) -> list[dict]:
    """Plain AdamW with clipping at 1; per step the loss, the gradient norm (also per agent) and the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    history = []
    for _ in range(steps):
        row: dict = {"agent_norm": {}}
        for agent in sorted({s.agent for s in samples}):
            model.zero_grad()
            sum(loss_of(model, s) for s in samples if s.agent == agent).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            row["agent_norm"][agent] = float(torch.stack([g.norm() for g in grads]).norm())
        model.zero_grad()
        loss = sum(loss_of(model, s) for s in samples)
        loss.backward()
        row["loss"] = float(loss.detach())
        row["norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        row["parameters"] = {name: p.detach().clone() for name, p in model.named_parameters()}
        history.append(row)
    return history
