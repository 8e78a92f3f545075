"""Agreement of engine and trainer in bfloat16: right weights must pass the bounds, and stale weights must not.

The engine is a plain Hugging Face model that samples token by token with its KV cache and torch's eager
attention, all prompts at once. The trainer is Megatron's, with packed sequences and its own attention.
The text is a Markov chain that is repeated once. The model is trained on it a little, so that likely
and unlikely tokens both occur.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from mcore_mas.credit.samples import Sample
from mcore_mas.equations.agreement import GAP_BOUNDS, describe_disagreement
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from tests.support import reference

LAYER_COUNTS = (2, 8, 16, 32)

# Training steps of the model; the last one is an update with the learning rate of the demo.
STEPS = 120
LR = 3e-3
DEMO_LR = 1e-4

# Prompts that the engine gets, and tokens of a prompt and of its reply.
PROMPTS = 64
PROMPT_TOKENS = 16
REPLY_TOKENS = 24

# A word of the chain is followed by one of four words, with these probabilities.
CHOICE_PROBABILITIES = torch.tensor([0.7, 0.2, 0.08, 0.02])
CHAIN_WORDS = 20

HEADER = """
## Engine and trainer in bfloat16

The engine is a Hugging Face model in bfloat16 that samples token by token with torch's eager attention. The trainer is
Megatron in bfloat16, on the packed sequences. Both have the weights of one tiny model (width 64), which was trained for
{steps} steps on a small language from random weights. In all rows but the first of each depth, some tensors of the
engine are older. The differences of log-probabilities are in nats, over {tokens} tokens in each row. A run stops beyond
mean {mean}, k3 {k3} or p99 {p99} (`GAP_BOUNDS` in `mcore_mas/equations/agreement.py`). In float32, the bound is
{maximum} on the maximum.

| layers | the engine's weights | mean | k3 | p99 | max | beyond 1 nat | run |
|---|---|---|---|---|---|---|---|
"""
NOTE = """
One update changes a tensor by less than bfloat16 rounds, and an old tensor in the middle of a deep model can have as
small an effect. No bound on log-probabilities finds these tensors and lets right weights pass. Checksums of the
engine's tensors find them after every update ([engines.md](engines.md)).
"""
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A trained model, and earlier weights of it.

    Attributes:
        model: in float32.
        initial: its random weights.
        before_update: its weights before the last update.
    """

    model: transformers.PreTrainedModel
    initial: Weights
    before_update: Weights

    @property
    def stale_weights(self) -> dict[str, Weights]:
        """Old weights that an engine may have, by their description in the table; "right" has none."""
        layers = self.model.config.num_hidden_layers
        middle = layers // 2
        first_values = "model.layers.0.self_attn.v_proj.weight"
        queries = f"model.layers.{middle}.self_attn.q_proj.weight"
        up = f"model.layers.{middle}.mlp.up_proj.weight"
        return {
            "right": {},
            f"`v_proj` of layer 1 of {layers} never updated": {
                first_values: self.initial[first_values]
            },
            f"`q_proj` of layer {middle + 1} never updated": {queries: self.initial[queries]},
            f"`up_proj` of layer {middle + 1} never updated": {up: self.initial[up]},
            f"`q_proj` of layer {middle + 1} one update behind": {
                queries: self.before_update[queries]
            },
            "all one update behind": self.before_update,
        }


def chain_text(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return random chains [rows, 2 · `CHAIN_WORDS`], each of which is repeated once."""
    words = reference.BASE["vocab_size"]
    choices = len(CHOICE_PROBABILITIES)
    followers_generator = torch.Generator().manual_seed(9)
    followers = torch.randint(0, words, (words, choices), generator=followers_generator)
    text = torch.randint(0, words, (rows, 1), generator=generator)
    for _ in range(CHAIN_WORDS - 1):
        probabilities = CHOICE_PROBABILITIES.expand(rows, -1)
        choice = torch.multinomial(probabilities, 1, generator=generator)
        next_word = followers[text[:, -1]].gather(1, choice)
        text = torch.cat([text, next_word], 1)
    return torch.cat([text, text], 1)


def train_model(layers: int) -> TrainedModel:
    """Train a model a little; the result is the same every time."""
    torch.manual_seed(0)
    config = reference.FAMILIES["qwen3"](num_hidden_layers=layers, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        # With larger embeddings, a deep model learns as fast as a shallow one.
        model.get_input_embeddings().weight.mul_(5.0)

    def copy_weights() -> Weights:
        return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    initial = copy_weights()
    before_update: Weights = {}
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS + 1):
        if step == STEPS:
            before_update = copy_weights()
            optimizer.param_groups[0]["lr"] = DEMO_LR
        text = chain_text(8, generator)
        optimizer.zero_grad()
        model(input_ids=text, labels=text).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return TrainedModel(model=model, initial=initial, before_update=before_update)


@torch.no_grad()
def sample_replies(engine: transformers.PreTrainedModel) -> list[Sample]:
    """Sample replies to the prompts, with their log-probabilities."""
    prompts = chain_text(PROMPTS, torch.Generator().manual_seed(3))[:, :PROMPT_TOKENS]
    torch.manual_seed(5)
    output = engine.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        output_logits=True,
        return_dict_in_generate=True,
        max_new_tokens=REPLY_TOKENS,
        min_new_tokens=REPLY_TOKENS,
        pad_token_id=0,
    )
    replies = output.sequences[:, PROMPT_TOKENS:]
    all_logprobs = torch.log_softmax(torch.stack(output.logits, 1).float(), -1)
    logprobs = all_logprobs.gather(2, replies[..., None])[..., 0]
    return [
        Sample(
            policy="p",
            agent="solver",
            task="t",
            trajectory=str(number),
            turn=0,
            prompt_ids=tuple(prompt.tolist()),
            completion_ids=tuple(reply.tolist()),
            behaviour=tuple(reply_logprobs.tolist()),
            advantages=(1.0,) * REPLY_TOKENS,
            weight=1.0,
        )
        for number, (prompt, reply, reply_logprobs) in enumerate(
            zip(prompts, replies, logprobs, strict=True)
        )
    ]


def compare_engines(
    trained: TrainedModel, stale_weights: Mapping[str, Weights], folder: Path, **settings: Any
) -> dict[str, dict[str, float]]:
    """Return the metrics of an update on the samples of each engine; the trainer's weights stay.

    Args:
        trained: model of the trainer and of the engines.
        stale_weights: weights of each engine that are not the trainer's, by the name of the engine.
        folder: gets the model.
        settings: further fields of the trainer's specification.
    """
    trained.model.save_pretrained(folder)
    spec = TrainerSpec(model=str(folder), bf16=True, lr=0.0, objective=Objective(), **settings)
    trainer = MegatronTrainer(spec)
    metrics = {}
    for name, weights in stale_weights.items():
        engine = copy.deepcopy(trained.model)
        with torch.no_grad():
            for parameter, stale in weights.items():
                engine.get_parameter(parameter).copy_(stale)
        samples = sample_replies(engine.bfloat16())
        metrics[name] = trainer.update(pack(samples, 1024))
    return metrics


def stop_reason(metrics: Mapping[str, float]) -> str:
    """Return the reason why a run in bfloat16 stops, or "" if it continues."""
    return describe_disagreement(metrics, GAP_BOUNDS["bfloat16"])


def agreement_section(folder: Path) -> str:
    """Return the section of docs/exactness.md; process groups of one rank must exist."""
    text = HEADER.format(
        steps=STEPS + 1,
        tokens=PROMPTS * REPLY_TOKENS,
        maximum=GAP_BOUNDS["float32"]["max"],
        **GAP_BOUNDS["bfloat16"],
    )
    for layers in LAYER_COUNTS:
        trained = train_model(layers)
        by_engine = compare_engines(trained, trained.stale_weights, folder / str(layers))
        for name, metrics in by_engine.items():
            cells = [str(layers), name]
            for figure in ("mean", "k3", "p99", "max"):
                value = metrics[f"agent/solver/logprob_gap_{figure}"]
                cells.append(f"{value:.1e}" if value < 0.01 else f"{value:.3f}")
            cells.append(f"{metrics['agent/solver/logprob_gap_outlier_count']:.0f}")
            cells.append("stops" if stop_reason(metrics) else "goes on")
            text += f"| {' | '.join(cells)} |\n"
    return text + NOTE
