"""Run folders with tasks and a model, ready to train."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from mcore_mas.config.compose import resolve
from mcore_mas.pipeline.base_model import make_base_model
from mcore_mas.pipeline.cold_start import bootstrap
from mcore_mas.pipeline.prepare import prepare_tasks

_models_folder = tempfile.TemporaryDirectory()
_models: dict[str, Path] = {}  # random models of this process, by the config that determines them


def make_run(results: Path, *overrides: str, experiment: str = "demo_math") -> Path:
    """Make the run folder of a demo on a random one-layer model; return it.

    A step has two tasks with two trajectories each.
    """
    folder = results / experiment
    policies = ("solver", "verifier") if experiment == "demo_math" else ("shared",)
    settings = [
        f"results={results}",
        "data.train=12",
        "data.test=6",
        "trainer.tasks_per_step=2",
        "trainer.group_size=2",
        *(f"policies.{policy}.model={folder / 'base'}" for policy in policies),
        "cold_start.base.layers=1",
    ]
    values = resolve([f"experiment={experiment}", *settings, *overrides])
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    prepare_tasks(folder / "config.yaml", folder / "tasks")
    sections = [values[name] for name in ("seed", "data", "agents", "cold_start")]
    key = json.dumps(sections, sort_keys=True)
    if key not in _models:
        _models[key] = Path(_models_folder.name, str(len(_models)))
        make_base_model(folder / "config.yaml", folder / "tasks", _models[key])
    shutil.copytree(_models[key], folder / "base")
    return folder


def cold_started_run(results: Path, *overrides: str, experiment: str) -> Path:
    """Make the run folder of an experiment up to its training, with its cold-started model; return it."""
    values = resolve([f"experiment={experiment}", f"results={results}", *overrides])
    folder = results / experiment
    folder.mkdir()
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    prepare_tasks(config, folder / "tasks")
    make_base_model(config, folder / "tasks", folder / "base")
    bootstrap(config, folder / "base", folder / "bootstrap")
    return folder


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl.

    The first row, step -1, is of the validation before training.
    """
    return [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]


def describe_model(folder: Path) -> Path:
    """Write the files of a model that a plan reads: sizes, a tokenizer and a file of weights.

    Each word of a text is one unknown token, so that prompts are short.
    """
    sizes = {
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes, **heads}))
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "<|im_end|>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"chat_template": "{{ messages }}", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    save_file({"model.norm.weight": torch.zeros(192)}, folder / "model.safetensors")
    return folder
