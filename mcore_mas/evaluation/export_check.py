"""Check that transformers reads an exported model as the run did.

Token ids are compared with those of the run, and log-probabilities with those of the embedded engine,
also if the run had another engine.

transformers replaces the pre-tokenizer of every Qwen2 model by the pre-tokenizer of the published
ones. A Qwen2 with another tokenizer is therefore rewritten as an equivalent Llama.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from mcore_mas.config.policy import PolicyConfig
from rollout.base.files import write_text
from rollout.base.json_files import read_json, write_json
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.engines.embedded.local import LocalEngine
from rollout.models.architecture import read_architecture, read_config
from rollout.models.chat_template import CHAT_TEMPLATES, Renderer, has_chat_template
from rollout.records.trajectory import Sampling, Turn

# Replies are compared for models whose weights are at most this large.
_MAX_REPLY_CHECK_BYTES = 4 << 30
_REPLY_TOKENS = 16
# Largest difference of a token's log-probability between transformers and the engine, in nats.
_TOLERANCE = 0.01
# Texts that are compared if the run has recorded none; the first is a prompt.
_DEFAULT_TEXTS = ("What is 20+24? Box it.", "\\boxed{44} <answer>Alice</answer>")

# Keys of a Qwen2 config that a Llama does not have.
_QWEN2_ONLY_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


class ExportError(ValueError):
    """Error of an export; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledReply:
    """Reply of the embedded engine to a prompt, with C tokens.

    Attributes:
        prompt_ids: [P].
        token_ids: [C].
        logprobs: [C] in nats.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def check_export(
    folder: Path, policy: PolicyConfig, turns: Sequence[Turn], note: Callable[[str], None]
) -> None:
    """Check that transformers gives the token ids of the run, and the embedded engine's log-probabilities.

    The log-probabilities of a mixture of experts, or of a model larger than 4 GiB, are not compared.
    Adds the policy's chat template to the folder if it has none. Rewrites a Qwen2 as a Llama if
    transformers would give it another tokenizer.

    Args:
        folder: folder of the exported model.
        policy: settings of the policy.
        turns: recorded turns of the policy, whose texts and first prompts are compared.
        note: called with lines about the result.

    Raises:
        ExportError: transformers reads the folder in another way than the run.
    """
    if policy.chat_template is not None and not has_chat_template(folder):
        write_text(folder / "chat_template.jinja", CHAT_TEMPLATES[policy.chat_template])
    renderer = Renderer(
        folder, template=policy.chat_template, arguments=policy.chat_template_kwargs
    )
    texts = _texts_of(turns) or list(_DEFAULT_TEXTS)
    prompts = [turn.prompt_ids for turn in turns[:2]] or [renderer.encode(_DEFAULT_TEXTS[0])]
    # Sample from the model that the run had, before it may be rewritten as a Llama.
    replies = sample_replies(folder, prompts) if _can_compare_replies(folder) else []

    if not _has_same_ids(folder, renderer, texts):
        _rewrite_as_llama(folder)
        note(
            "written as a Llama with biases: AutoTokenizer would read the tokenizer of a Qwen2 in "
            "another way"
        )
        if not _has_same_ids(folder, renderer, texts):
            raise ExportError(f"{folder}: AutoTokenizer gives other token ids than the run had")

    gap = _largest_gap(folder, replies) if replies else 0.0
    if gap > _TOLERANCE:
        raise ExportError(
            f"{folder}: log-probabilities of transformers and of the embedded engine differ by {gap:.2g} nats"
        )
    tokens = sum(len(reply.token_ids) for reply in replies)
    compared = f"log-probabilities of {tokens} tokens" if replies else "no log-probabilities"
    note(f"compared with transformers, and equal: ids of {len(texts)} texts, {compared}")


def _texts_of(turns: Sequence[Turn]) -> list[str]:
    """Return the texts of all messages and replies of turns."""
    texts = []
    for turn in turns:
        texts += [message.text for message in turn.messages]
        texts.append(turn.text)
    return texts


def _can_compare_replies(folder: Path) -> bool:
    """Return True unless the model is too large to compare replies, or a mixture of experts."""
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return weight_bytes <= _MAX_REPLY_CHECK_BYTES and read_architecture(folder).experts is None


def _has_same_ids(folder: Path, renderer: Renderer, texts: Sequence[str]) -> bool:
    """Return True if AutoTokenizer gives the token ids of the run's renderer."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return all(
        tuple(tokenizer.encode(text, add_special_tokens=False)) == renderer.encode(text)
        for text in texts
    )


def sample_replies(folder: Path, prompts: Sequence[Sequence[int]]) -> list[SampledReply]:
    """Sample a reply to each prompt with the embedded engine."""
    max_length = max(len(prompt) for prompt in prompts) + _REPLY_TOKENS
    engine = LocalEngine(EmbeddedEngine.from_folder(folder, max_length=max_length, rows=2))

    async def sample_all() -> list[SampledReply]:
        replies = []
        for number, prompt in enumerate(prompts):
            sampling = Sampling(max_tokens=_REPLY_TOKENS, seed=number)
            completion = await engine.generate(prompt, sampling)
            replies.append(
                SampledReply(
                    prompt_ids=tuple(prompt),
                    token_ids=completion.token_ids,
                    logprobs=completion.logprobs,
                )
            )
        return replies

    return asyncio.run(sample_all())


def _largest_gap(folder: Path, replies: Sequence[SampledReply]) -> float:
    """Return the largest difference of log-probabilities between transformers and the engine, in nats."""
    disable_progress_bar()  # loading takes milliseconds, and the bar would be the longest line
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True
    ).eval()
    largest = 0.0
    for reply in replies:
        token_ids = torch.tensor([[*reply.prompt_ids, *reply.token_ids]])
        with torch.no_grad():
            logits = model(token_ids).logits[0, len(reply.prompt_ids) - 1 : -1]
        reply_ids = torch.tensor(reply.token_ids)[:, None]
        logprobs = logits.log_softmax(-1).gather(1, reply_ids)[:, 0]
        gap = (logprobs - torch.tensor(reply.logprobs)).abs().max()
        largest = max(largest, float(gap))
    return largest


def _rewrite_as_llama(folder: Path) -> None:
    """Rewrite a Qwen2 as a Llama with attention biases; the biases of `o_proj` are 0.

    Raises:
        ExportError: the model is not a Qwen2 model.
    """
    config = read_config(folder)
    model_type = config.get("model_type")
    if model_type != "qwen2":
        raise ExportError(
            f"{folder}: AutoTokenizer gives other token ids than the run had; only a Qwen2 can be "
            f"rewritten as a Llama, not model_type '{model_type}'"
        )
    for key in _QWEN2_ONLY_KEYS:
        config.pop(key, None)
    config["model_type"] = "llama"
    config["architectures"] = ["LlamaForCausalLM"]
    config["attention_bias"] = True
    config["mlp_bias"] = False
    write_json(folder / "config.json", config)

    index_file = folder / "model.safetensors.index.json"
    if index_file.is_file():
        index = read_json(index_file)
    else:
        weights = folder / "model-00001.safetensors"
        (folder / "model.safetensors").rename(weights)
        with safe_open(weights, "pt") as tensors:
            index = {"metadata": {}, "weight_map": dict.fromkeys(tensors.keys(), weights.name)}
    biases = {
        f"model.layers.{layer}.self_attn.o_proj.bias": torch.zeros(config["hidden_size"])
        for layer in range(config["num_hidden_layers"])
    }
    save_file(biases, folder / "model-biases.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(biases, "model-biases.safetensors")
    write_json(index_file, index)
