"""A tokenizer and a small random Qwen2, made from a run's own text, in Hugging Face format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mcore_mas.cold_start_config import ColdStartConfig
from mcore_mas.config import RunConfig
from retrieval.corpus import Corpus
from rollout.build import build_role
from rollout.records import Demonstration, read_tasks
from rollout.registry import lookup
from rollout.seeds import derive_seed
from rollout.tasks import GENERATORS

_END, _START, _STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_DEMONSTRATIONS_READ = 4000  # for the vocabulary
_WORD = r" ?</?[a-z]+>| ?\p{L}+| ?[^\s\p{L}]+|\s+"  # a tag, a word or a sign, each with the space before it
_INIT_STD = 0.06  # a model this narrow learns several times faster from here than from the usual 0.02


def demonstrations(config: RunConfig, cold_start: ColdStartConfig, n: int) -> Iterator[Demonstration]:
    """`n` demonstrations by the run's generator, in the words of the run's agents."""
    assert config.data.generator is not None  # RunConfig has checked it
    roles = {name: build_role(name, agent) for name, agent in config.agents.items()}
    return lookup("task generator", config.data.generator, GENERATORS).demonstrations(
        config.seed, n, roles=roles, **config.data.options, **cold_start.options
    )


def make_base_model(config_path: Path, tasks_dir: Path, out_dir: Path) -> None:
    """Write a Hugging Face folder with a byte-level BPE tokenizer, a chat template and random weights.

    Same config and seed, same bytes.
    """
    config = RunConfig.load(config_path)
    assert config.cold_start is not None, "a run without a cold start brings its own model"
    base = config.cold_start.base
    _train_tokenizer(_texts(config, config.cold_start, tasks_dir), base.vocab, base.tokens, out_dir)
    _init_model(config, config.cold_start, out_dir)


def _texts(config: RunConfig, cold_start: ColdStartConfig, tasks_dir: Path) -> Iterator[str]:
    for demonstration in demonstrations(config, cold_start, _DEMONSTRATIONS_READ):
        for message in demonstration.messages:  # as the chat template writes them; a reply is tokenised by itself
            written = message.role == "assistant"
            yield from (f"{message.role}\n", message.content) if written else (f"{message.role}\n{message.content}",)
    for task in read_tasks(tasks_dir / "train.parquet"):
        yield task.prompt
    passages = tasks_dir / "passages.jsonl"
    if passages.is_file():
        for passage in Corpus(passages):
            yield f"{passage.title}\n{passage.text}"


def _train_tokenizer(texts: Iterator[str], vocab: int, unit: str, out_dir: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read by tokenizers; with threads, ties may fall either way
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            *([pre_tokenizers.Split(Regex(_WORD), "isolated")] if unit == "words" else []),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[_END, _START, _STOP],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_STOP, pad_token=_END)
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(str(out_dir))


def _init_model(config: RunConfig, cold_start: ColdStartConfig, out_dir: Path) -> None:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(out_dir), local_files_only=True)
    base = cold_start.base
    torch.manual_seed(derive_seed(config.seed, "base model") % 2**63)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=base.hidden,
            num_hidden_layers=base.layers,
            num_attention_heads=base.heads,
            num_key_value_heads=base.kv_heads,
            intermediate_size=base.ffn,
            max_position_embeddings=base.positions,
            tie_word_embeddings=True,
            initializer_range=_INIT_STD,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(str(out_dir))
