"""Randomly initialised models with tokenizers: for a cold start, and for the scale `tiny`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

from mcore_mas.config.cold_start import BaseModelConfig, ColdStartConfig
from mcore_mas.config.run import RunConfig
from retrieval.corpus import Corpus
from rollout.base.lookup import lookup
from rollout.config.agents import build_team
from rollout.models.chat_template import CHAT_TEMPLATES
from rollout.orchestras.replies import parse_spoken
from rollout.records.files import read_tasks
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Demonstration
from rollout.tasks.arithmetic import arithmetic_tasks
from rollout.tasks.generators import GENERATORS
from rollout.teams.roles import ROLES

_END_OF_TEXT = "<|endoftext|>"
_START_OF_MESSAGE = "<|im_start|>"
_END_OF_MESSAGE = "<|im_end|>"
_VOCABULARY_DEMONSTRATIONS = 4000
# A tag, a word or a sign, each with the space before it, or white space.
_WORD = r" ?</?[a-z]+>| ?\p{L}+| ?[^\s\p{L}]+|\s+"
# A model this narrow learns several times faster from this than from the usual 0.02.
_INIT_STD = 0.06

# Architecture in transformers by the first letters of a model's name; other models are Qwen2.
_FAMILIES = {"Qwen3": "Qwen3", "AReaL": "Qwen3", "Llama": "Llama"}
_NO_THOUGHT = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
# Embeddings of a tiny model share a component, larger for the stop token: it is sampled about once
# in ten tokens, so that some replies end by themselves.
_COMMON_EMBEDDING = 0.1
_STOP_FACTOR = 2.1


def generate_demonstrations(
    config: RunConfig, cold_start: ColdStartConfig, n: int
) -> Iterator[Demonstration]:
    """Yield `n` demonstrations that the run's task generator makes, in the words of the run's agents."""
    generator = lookup("task generator", config.data.generator or "", GENERATORS)
    demonstrations = generator.demonstrations
    assert demonstrations is not None  # RunConfig has checked it
    agents = build_team(config.agents, {}).agents
    # A generator takes the agents, or only their roles.
    team: dict[str, Any]
    if "agents" in signature(demonstrations).parameters:
        team = {"agents": agents}
    else:
        team = {"roles": {name: agent.role for name, agent in agents.items()}}
    options = config.data.arguments | config.data.demonstration_arguments(cold_start.options)
    return demonstrations(config.seed, n, **team, **options)


def make_base_model(config_path: Path, tasks_dir: Path, out_dir: Path) -> None:
    """Write a Hugging Face folder with a byte-level BPE tokenizer and random weights.

    The same config and seed give the same bytes.

    Args:
        config_path: resolved config of a run with a cold start.
        tasks_dir: folder of the run's tasks and passages, whose texts the tokenizer is trained on.
    """
    config = RunConfig.load(config_path)
    cold_start = config.cold_start
    assert cold_start is not None, "a run without a cold start brings its own model"
    base = cold_start.base
    texts = _vocabulary_texts(config, cold_start, tasks_dir)
    tokenizer = train_tokenizer(texts, base.vocab, base.tokens)
    tokenizer.save_pretrained(str(out_dir))
    model = init_model(tokenizer, base, derive_seed(config.seed, "base model") % 2**63)
    model.save_pretrained(str(out_dir))


def make_tiny_model(out_dir: str | Path) -> None:
    """Write a small random model of the family that the folder's name begins with."""
    out_dir = Path(out_dir)
    families = [family for prefix, family in _FAMILIES.items() if out_dir.name.startswith(prefix)]
    family = families[0] if families else "Qwen2"

    role_texts: list[str] = []
    for role in ROLES.values():
        # A role with a system prompt and free replies, as in games, has no marks to learn tokens for.
        if not (role.system and role.parse is parse_spoken):
            role_texts += (role.system, role.user)
    prompts = [task.prompt for task in arithmetic_tasks(1, {"train": 100})]
    tokenizer = train_tokenizer(iter([*role_texts, *prompts]), 1024, "words")
    tokenizer.chat_template = CHAT_TEMPLATES["chatml"]
    if family == "Qwen3":
        tokenizer.chat_template += _NO_THOUGHT
    tokenizer.save_pretrained(str(out_dir))

    sizes = BaseModelConfig(
        layers=1, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=1024, positions=4096
    )
    model = init_model(tokenizer, sizes, derive_seed(1, out_dir.name) % 2**63, family)
    embeddings = model.get_input_embeddings().weight.data  # [vocab, hidden], tied to the output
    embeddings += _COMMON_EMBEDDING
    embeddings[tokenizer.eos_token_id] += _STOP_FACTOR * _COMMON_EMBEDDING
    model.save_pretrained(str(out_dir))


def _vocabulary_texts(
    config: RunConfig, cold_start: ColdStartConfig, tasks_dir: Path
) -> Iterator[str]:
    """Yield the texts that a run's tokenizer is trained on, as the chat template writes them."""
    for demonstration in generate_demonstrations(config, cold_start, _VOCABULARY_DEMONSTRATIONS):
        for message in demonstration.messages:
            if message.role == "assistant":  # replies are tokenized without their header
                yield f"{message.role}\n"
                yield message.content
            else:
                yield f"{message.role}\n{message.content}"
    for task in read_tasks(tasks_dir / "train.parquet"):
        yield task.prompt
    passages = tasks_dir / "passages.jsonl"
    if passages.is_file():
        for passage in Corpus(passages):
            yield f"{passage.title}\n{passage.text}"


def train_tokenizer(texts: Iterator[str], vocab: int, unit: str) -> Any:
    """Train a byte-level BPE tokenizer; return it as a PreTrainedTokenizerFast.

    Args:
        vocab: maximum number of tokens.
        unit: largest text that may become one token, as `BaseModelConfig.tokens`.
    """
    # tokenizers reads the variable; with several threads, ties may be broken either way
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)]
    if unit == "words":
        steps.append(pre_tokenizers.Split(Regex(_WORD), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[_END_OF_TEXT, _START_OF_MESSAGE, _END_OF_MESSAGE],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)

    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END_OF_MESSAGE, pad_token=_END_OF_TEXT
    )
    fast_tokenizer.chat_template = CHAT_TEMPLATES["chatml"]
    return fast_tokenizer


def init_model(tokenizer: Any, base: BaseModelConfig, seed: int, family: str = "Qwen2") -> Any:
    """Return a transformers model of the given sizes with random weights.

    Args:
        tokenizer: tokenizer, which has the vocabulary and the stop token.
        family: name of an architecture in transformers, such as "Qwen2".
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    sizes = {**base.transformers_settings, "vocab_size": len(tokenizer)}
    if family == "Qwen3":  # its default is not hidden / heads
        sizes["head_dim"] = base.hidden // base.heads
    config = getattr(transformers, f"{family}Config")(
        **sizes,
        initializer_range=_INIT_STD,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return getattr(transformers, f"{family}ForCausalLM")(config)
