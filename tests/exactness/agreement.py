"""Whether the bounds on engine against trainer tell right weights from stale ones in bfloat16, at several depths.

The engine is a plain Hugging Face model that samples token by token from its cache, all prompts at once, by torch's
eager attention; the trainer is Megatron's, with packed sequences and its own attention. The text is a Markov chain that
is told twice, on which the model is trained a little, so that likely and unlikely tokens both occur.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from mcore_mas.credit.samples import Sample
from mcore_mas.equations.divergence import GAP_BOUNDS, describe_disagreement
from mcore_mas.equations.losses import Objective
from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from tests.support import reference

DEPTHS = (2, 8, 16, 32)  # layers
STEPS, LR = 120, 3e-3  # of training before, and one more at the demo's rate
DEMO_LR = 1e-4
ROWS, PROMPT, REPLY = 64, 16, 24
CHOICES = torch.tensor([0.7, 0.2, 0.08, 0.02])  # of what follows a word of the chain
TABLE = """
## Engine and trainer in bfloat16

Engine: a Hugging Face model in bfloat16, sampling token by token with torch's eager attention. Trainer: Megatron in
bfloat16, on the packed sequences. Both have the weights of one tiny model (width 64), trained on a small language for
{steps} steps from random weights, of which the engine may have a tensor as it was. {tokens} tokens in each row; nats.
A run stops beyond mean {mean}, k3 {k3} or p99 {p99} (`GAP_BOUNDS` in `mcore_mas/equations/divergence.py`). In float32
the bound is {maximum} on the maximum.

| layers | the engine's weights | mean | k3 | p99 | max | beyond 1 nat | run |
|---|---|---|---|---|---|---|---|
"""
NOTE = """
What one update changes in one tensor lies below what bfloat16 rounds, and so may an old tensor in the middle of a deep
model: no bound on log-probabilities finds it that lets right weights pass. Checksums of the engine's tensors do
([engines.md](engines.md)), after every update.
"""
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model, and its weights at three times."""

    model: transformers.PreTrainedModel  # float32
    first: Weights  # random
    before: Weights  # those before the last update

    @property
    def stale(self) -> dict[str, Weights]:
        """What the engine may hold in place of the model's own, by what a table says of it."""
        layers = self.model.config.num_hidden_layers
        values = "model.layers.0.self_attn.v_proj.weight"
        queries = f"model.layers.{layers // 2}.self_attn.q_proj.weight"
        wide = f"model.layers.{layers // 2}.mlp.up_proj.weight"
        return {
            "right": {},
            f"`v_proj` of layer 1 of {layers} never updated": {values: self.first[values]},
            f"`q_proj` of layer {layers // 2 + 1} never updated": {queries: self.first[queries]},
            f"`up_proj` of layer {layers // 2 + 1} never updated": {wide: self.first[wide]},
            f"`q_proj` of layer {layers // 2 + 1} one update behind": {
                queries: self.before[queries]
            },
            "all one update behind": self.before,
        }


def told(rows: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, 40] words of a chain of 20, twice."""
    words = reference.BASE["vocab_size"]
    follow = torch.randint(
        0, words, (words, len(CHOICES)), generator=torch.Generator().manual_seed(9)
    )
    text = torch.randint(0, words, (rows, 1), generator=generator)
    for _ in range(19):
        choice = torch.multinomial(CHOICES.expand(rows, -1), 1, generator=generator)
        text = torch.cat([text, follow[text[:, -1]].gather(1, choice)], 1)
    return torch.cat([text, text], 1)


def trained(layers: int) -> Trained:
    """A model that has learned a little, the same each time."""
    torch.manual_seed(0)
    config = reference.FAMILIES["qwen3"](num_hidden_layers=layers, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(5.0)  # a deep model then learns as fast as another

    def weights() -> Weights:
        return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    first, before, generator = weights(), {}, torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS + 1):
        if step == STEPS:
            before = weights()
            optimizer.param_groups[0]["lr"] = DEMO_LR
        text = told(8, generator)
        optimizer.zero_grad()
        model(input_ids=text, labels=text).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return Trained(model=model, first=first, before=before)


@torch.no_grad()
def played(engine: transformers.PreTrainedModel) -> list[Sample]:
    """Replies that an engine samples, with its log-probabilities."""
    prompts = told(ROWS, torch.Generator().manual_seed(3))[:, :PROMPT]
    torch.manual_seed(5)
    sizes = {"max_new_tokens": REPLY, "min_new_tokens": REPLY, "pad_token_id": 0}
    found = engine.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        output_logits=True,
        return_dict_in_generate=True,
        **sizes,
    )
    replies = found.sequences[:, PROMPT:]
    logprobs = torch.log_softmax(torch.stack(found.logits, 1).float(), -1).gather(
        2, replies[..., None]
    )[..., 0]
    return [
        Sample(
            policy="p",
            agent="solver",
            task="t",
            trajectory=str(number),
            turn=0,
            prompt_ids=tuple(prompt.tolist()),
            completion_ids=tuple(reply.tolist()),
            behaviour=tuple(row.tolist()),
            advantages=(1.0,) * REPLY,
            weight=1.0,
        )
        for number, (prompt, reply, row) in enumerate(zip(prompts, replies, logprobs, strict=True))
    ]


def compared(
    known: Trained, engines: Mapping[str, Weights], folder: Path
) -> dict[str, dict[str, float]]:
    """The metrics of an update on what engines with older weights sampled, by engine; the weights stay."""
    known.model.save_pretrained(folder)
    spec = TrainerSpec(model=str(folder), bf16=True, lr=0.0, objective=Objective())
    trainer, metrics = MegatronTrainer(spec), {}
    for name, older in engines.items():
        engine = copy.deepcopy(known.model)
        with torch.no_grad():
            for tensor, old in older.items():
                engine.get_parameter(tensor).copy_(old)
        metrics[name] = trainer.update(pack(played(engine.bfloat16()), 1024))
    return metrics


def stops(metrics: Mapping[str, float]) -> str:
    """Why a run in bfloat16 would stop, or ""."""
    return describe_disagreement(metrics, GAP_BOUNDS["bfloat16"])


def section(folder: Path) -> str:
    """The page's section; one process group must be there."""
    rows = ""
    for layers in DEPTHS:
        known = trained(layers)
        for name, metrics in compared(known, known.stale, folder / str(layers)).items():
            figures = [
                metrics[f"agent/solver/logprob_gap_{figure}"]
                for figure in ("mean", "k3", "p99", "max")
            ]
            outliers = metrics["agent/solver/logprob_gap_outlier_count"]
            verdict = "stops" if stops(metrics) else "goes on"
            numbers = " | ".join(
                f"{figure:.1e}" if figure < 0.01 else f"{figure:.3f}" for figure in figures
            )
            rows += f"| {layers} | {name} | {numbers} | {outliers:.0f} | {verdict} |\n"
    bounds, maximum = GAP_BOUNDS["bfloat16"], GAP_BOUNDS["float32"]["max"]
    return (
        TABLE.format(steps=STEPS + 1, tokens=ROWS * REPLY, maximum=maximum, **bounds) + rows + NOTE
    )
