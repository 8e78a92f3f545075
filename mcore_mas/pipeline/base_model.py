"""Models from nothing, for a cold start and for the scale `tiny`; and a project of one's own that starts from one."""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from mcore_mas import SHIPPED
from mcore_mas.config.cold_start import BaseModelConfig, ColdStartConfig
from mcore_mas.config.run import RunConfig
from retrieval.corpus import Corpus
from rollout.base.files import write_text
from rollout.base.lookup import lookup
from rollout.config.sections import build_team
from rollout.models.chat_template import CHAT_TEMPLATES
from rollout.records.files import read_tasks
from rollout.records.seeds import derive_seed
from rollout.records.trajectory import Demonstration
from rollout.tasks import GENERATORS
from rollout.tasks.arithmetic import arithmetic_tasks
from rollout.teams.roles import ROLES

_END, _START, _STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_DEMONSTRATIONS_READ = 4000  # for the vocabulary
_WORD = r" ?</?[a-z]+>| ?\p{L}+| ?[^\s\p{L}]+|\s+"  # a tag, a word or a sign, each with the space before it
_INIT_STD = (
    0.06  # a model this narrow learns several times faster from here than from the usual 0.02
)


def run_demonstrations(
    config: RunConfig, cold_start: ColdStartConfig, n: int
) -> Iterator[Demonstration]:
    """`n` demonstrations by the run's generator, in the words of the run's agents."""
    generator = lookup("task generator", config.data.generator or "", GENERATORS)
    assert generator.demonstrations is not None  # RunConfig has checked it
    agents = build_team(config.agents, {}).agents
    roles = {name: agent.role for name, agent in agents.items()}
    team = (
        {"agents": agents}
        if "agents" in signature(generator.demonstrations).parameters
        else {"roles": roles}
    )
    options = config.data.arguments | config.data.demonstration_arguments(cold_start.options)
    return generator.demonstrations(config.seed, n, **team, **options)


def make_base_model(config_path: Path, tasks_dir: Path, out_dir: Path) -> None:
    """Write a Hugging Face folder with a byte-level BPE tokenizer, a chat template and random weights.

    Same config and seed, same bytes.
    """
    config = RunConfig.load(config_path)
    assert config.cold_start is not None, "a run without a cold start brings its own model"
    base = config.cold_start.base
    tokenizer = train_tokenizer(
        _texts(config, config.cold_start, tasks_dir), base.vocab, base.tokens
    )
    tokenizer.save_pretrained(str(out_dir))
    init_model(tokenizer, base, derive_seed(config.seed, "base model") % 2**63).save_pretrained(
        str(out_dir)
    )


def make_tiny_model(out_dir: str | Path) -> None:
    """Write a small random model of the family that `out_dir` is named after, for the scale `tiny`."""
    out_dir = Path(out_dir)
    family = next(
        (family for prefix, family in _FAMILIES if out_dir.name.startswith(prefix)), "Qwen2"
    )
    texts = [text for role in ROLES.values() for text in (role.system, role.user)]
    tasks = arithmetic_tasks(1, {"train": 100})
    tokenizer = train_tokenizer(iter([*texts, *(task.prompt for task in tasks)]), 1024, "words")
    tokenizer.chat_template = (
        f"{CHAT_TEMPLATES['chatml']}{_NO_THOUGHT if family == 'Qwen3' else ''}"
    )
    base = BaseModelConfig(
        layers=1, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=1024, positions=4096
    )
    tokenizer.save_pretrained(str(out_dir))
    model = init_model(tokenizer, base, derive_seed(1, out_dir.name) % 2**63, family)
    # one part is common to all embeddings, which are the output's rows too: the stop token's is larger, so that it is
    # drawn about once in ten tokens, and some replies end by themselves
    embeddings = model.get_input_embeddings().weight.data
    embeddings += _COMMON
    embeddings[tokenizer.eos_token_id] += _STOPS * _COMMON
    model.save_pretrained(str(out_dir))


_COMMON, _STOPS = 0.1, 2.1
# first letters of a model's name and its architecture in transformers
_FAMILIES = (("Qwen3", "Qwen3"), ("AReaL", "Qwen3"), ("Llama", "Llama"))
_NO_THOUGHT = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def _texts(config: RunConfig, cold_start: ColdStartConfig, tasks_dir: Path) -> Iterator[str]:
    for demonstration in run_demonstrations(config, cold_start, _DEMONSTRATIONS_READ):
        for message in (
            demonstration.messages
        ):  # as the chat template writes them; a reply is tokenised by itself
            written = message.role == "assistant"
            yield from (
                (f"{message.role}\n", message.content)
                if written
                else (f"{message.role}\n{message.content}",)
            )
    for task in read_tasks(tasks_dir / "train.parquet"):
        yield task.prompt
    passages = tasks_dir / "passages.jsonl"
    if passages.is_file():
        for passage in Corpus(passages):
            yield f"{passage.title}\n{passage.text}"


def train_tokenizer(texts: Iterator[str], vocab: int, unit: str) -> Any:
    """A byte-level BPE tokenizer of at most `vocab` tokens; `unit` as `BaseModelConfig.tokens`."""
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # read by tokenizers; with threads, ties may fall either way
    )
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
    fast.chat_template = CHAT_TEMPLATES["chatml"]
    return fast


def init_model(tokenizer: Any, base: BaseModelConfig, seed: int, family: str = "Qwen2") -> Any:
    """A model of that size for the tokenizer, its weights drawn by `seed`."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # writing takes milliseconds
    torch.manual_seed(seed)
    own = (
        {"head_dim": base.hidden // base.heads} if family == "Qwen3" else {}
    )  # it is not hidden / heads by itself
    return getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(
            **{**base.transformers_settings, **own, "vocab_size": len(tokenizer)},
            initializer_range=_INIT_STD,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


# its models/tiny is what `make_tiny_model` writes: to import what draws weights takes ten times as long as all else
_FILES = Path(__file__).with_name("scaffold")
_NAME = "my_team"  # as the files say


class ScaffoldError(ValueError):
    """A project cannot be made: says why, and what to do."""


def new_project(name: str, parent: Path) -> Path:
    """Write a project called `name` into a folder of that name, with a small random model.

    Raises:
        ScaffoldError: the name is none of a Python package or is taken, or the folder holds something or cannot be
            made. Nothing is written then.
    """
    if (
        not re.fullmatch(r"(?!(?i:nan|inf)$)[A-Za-z]\w*", name, re.ASCII)
        or keyword.iskeyword(name)
        or yaml.safe_load(name) != name
    ):
        raise ScaffoldError(
            f"'{name}' cannot be a Python package; expected letters, digits and _, such as my_team"
        )
    folder = parent / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ScaffoldError(
            f"{folder}: something is there already; name another project, or remove it"
        )
    spec, own = find_spec(name), {file.name for file in _FILES.iterdir()} - {_NAME} | {"results"}
    if name in own or (spec and spec.origin):  # a folder without modules has no origin
        which = (
            "one of a project's own folders"
            if name in own
            else "a Python module that is installed here"
        )
        raise ScaffoldError(f"'{name}' is {which}; take another name, such as my_{name}")
    try:
        with TemporaryDirectory(dir=parent, prefix=f".{name}-") as made:
            for file in sorted(_FILES.rglob("*.txt")):
                place = str(file.relative_to(_FILES)).removesuffix(".txt").replace(_NAME, name)
                text = (
                    file.read_text(encoding="utf-8")
                    .replace(_NAME, name)
                    .replace("SHIPPED", str(SHIPPED))
                )
                write_text(Path(made, name, place), text)
            copytree(_FILES / "models", Path(made, name, "models"))
            Path(made, name).rename(folder)
    except OSError as error:
        raise ScaffoldError(
            f"{folder.absolute()}: cannot be written ({error.strerror}); go to a folder of yours"
        ) from error
    return folder
