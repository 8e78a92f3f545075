"""Export of a policy: refusals, adapters, and the comparison with transformers."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.evaluation.export import export, one_rank_spec
from mcore_mas.evaluation.export_check import ExportError, SampledReply
from mcore_mas.pipeline.base_model import make_tiny_model
from rollout.models.chat_template import Renderer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run before its training, with an adapter and a frozen policy."""
    settings = ["+policies.solver.lora={rank: 2, alpha: 4}", "+agents.verifier.loss_weight=0"]
    folder = tmp_path / "demo_math"
    folder.mkdir()
    config = resolve(["experiment=demo_math", *settings])
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def finish_training(run: Path, model: Path) -> Path:
    """Let a model be what the run has trained; return its folder there."""
    trained = run / "train" / "models" / "solver"
    shutil.copytree(model, trained)
    (run / "train" / "done.json").write_text("{}")
    return trained


def test_a_checkpoint_of_any_layout_and_layers_is_read_on_one_rank_of_any_machine() -> None:
    settings = {
        "tp": 2,
        "sp": "true",
        "pp": 2,
        "vpp": 2,
        "dp": 4,
        "ep": 2,
        "distributed_optimizer": "true",
        "layers": "te",
        "bf16": "true",
    }
    overrides = [f"+policies.solver.{name}={value}" for name, value in settings.items()]
    config = RunConfig.from_values(
        resolve(["experiment=demo_math", "cluster.device=auto", *overrides]), "a test"
    )
    spec = one_rank_spec(config, "solver")
    assert (spec.ranks, spec.ep, spec.vpp, spec.sp) == (1, 1, 1, False)
    assert (spec.layers, spec.overlap, spec.distributed_optimizer) == ("local", False, False)
    assert spec.bf16


class TestRefusals:
    @pytest.mark.parametrize(
        ("policy", "adapter", "message"),
        [
            ("solvr", False, "no policy 'solvr'; policies: solver, verifier"),
            ("verifier", False, "policy 'verifier' is frozen; it is "),
            ("solver", True, "no finished model and no valid checkpoint; train it first"),
        ],
    )
    def test_missing_policies_and_models_are_named(
        self, run: Path, policy: str, adapter: bool, message: str
    ) -> None:
        with pytest.raises(ExportError, match=message):
            export(run, policy, run / "out", print, adapter=adapter)
        assert not (run / "out").exists()

    def test_nothing_is_overwritten(self, run: Path) -> None:
        message = r"demo_math: something is there already; name a folder that is empty"
        with pytest.raises(ExportError, match=message):
            export(run, "solver", run, print)

    def test_a_policy_without_adapter_has_none_to_export(self, run: Path) -> None:
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["policies"]["solver"]["lora"] = None
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        message = r"trains all weights and has no adapter; leave out --adapter"
        with pytest.raises(ExportError, match=message):
            export(run, "solver", run / "out", print, adapter=True)

    def test_an_export_with_other_log_probabilities_is_refused(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_tiny_model(tmp_path / "Qwen3-own")
        finish_training(run, tmp_path / "Qwen3-own")
        wrong_reply = SampledReply(prompt_ids=(1, 2), token_ids=(5,), logprobs=(-0.1,))
        monkeypatch.setattr(
            "mcore_mas.evaluation.export_check.sample_replies",
            lambda folder, prompts: [wrong_reply],
        )
        message = r"log-probabilities of transformers and of the embedded engine differ by \S+ nats"
        with pytest.raises(ExportError, match=message):
            export(run, "solver", run / "out", print)
        assert not (run / "out").exists()


@pytest.mark.parametrize(
    ("family", "exported_type"), [("Qwen2-own", "llama"), ("Qwen3-own", "qwen3")]
)
def test_transformers_reads_an_export_like_the_run(
    run: Path, tmp_path: Path, family: str, exported_type: str
) -> None:
    """transformers replaces the pre-tokenizer of every Qwen2: one is exported as a Llama."""
    make_tiny_model(tmp_path / family)
    model = finish_training(run, tmp_path / family)
    text = "Check 384+77 step by step. <verify>approve</verify>\n\n<answer>Alice</answer>"
    ids = list(Renderer(model).encode(text))
    is_replaced = token_ids_in_transformers(model, text) != ids
    assert is_replaced is (exported_type == "llama")

    notes: list[str] = []
    exported = run / "out"
    export(run, "solver", exported, notes.append)
    assert notes[0] == f"solver from {model}"
    assert notes[-1] == (
        "compared with transformers, and equal: ids of 2 texts, log-probabilities of 16 tokens"
    )
    config = json.loads((exported / "config.json").read_text())
    assert config["model_type"] == exported_type
    assert token_ids_in_transformers(exported, text) == ids
    assert torch.equal(logits_of(model, ids), logits_of(exported, ids))


def token_ids_in_transformers(model: Path, text: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    return tokenizer.encode(text, add_special_tokens=False)


def logits_of(model: Path, ids: list[int]) -> torch.Tensor:
    loaded = AutoModelForCausalLM.from_pretrained(str(model)).eval()
    with torch.no_grad():
        return loaded(torch.tensor([ids])).logits


def test_an_adapter_is_copied(run: Path) -> None:
    adapter = run / "train" / "models" / "solver" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (run / "train" / "done.json").write_text("{}")
    notes: list[str] = []
    exported = run / "adapter_only"
    export(run, "solver", exported, notes.append, adapter=True)
    assert notes == [f"solver from {adapter}"]
    assert [path.name for path in exported.iterdir()] == ["adapter_config.json"]


@pytest.mark.parametrize(("umask", "modes"), [(0o022, (0o755, 0o644)), (0o077, (0o700, 0o600))])
def test_an_export_has_the_permissions_of_the_umask(
    run: Path, umask: int, modes: tuple[int, int]
) -> None:
    adapter = run / "train" / "models" / "solver" / "adapter"
    adapter.mkdir(parents=True, mode=0o700)
    weights = adapter / "adapter_model.safetensors"
    weights.touch(mode=0o600)
    (run / "train" / "done.json").write_text("{}")
    exported = run / "adapter_only"
    earlier_umask = os.umask(umask)
    try:
        export(run, "solver", exported, print, adapter=True)
    finally:
        os.umask(earlier_umask)
    paths = (exported, exported / weights.name)
    assert tuple(path.stat().st_mode & 0o777 for path in paths) == modes
    assert weights.stat().st_mode & 0o777 == 0o600


def test_a_failed_export_to_an_empty_folder_can_be_repeated(run: Path) -> None:
    adapter = run / "train" / "models" / "solver" / "adapter"
    adapter.parent.mkdir(parents=True)
    (run / "train" / "done.json").write_text("{}")
    exported = run / "out"
    exported.mkdir()
    with pytest.raises(FileNotFoundError):
        export(run, "solver", exported, print, adapter=True)

    adapter.mkdir()
    (adapter / "adapter_config.json").touch()
    export(run, "solver", exported, print, adapter=True)
    assert [path.name for path in exported.iterdir()] == ["adapter_config.json"]


def test_an_export_to_the_current_folder_leaves_it_the_current_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = run / "train" / "models" / "solver" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").touch()
    (run / "train" / "done.json").write_text("{}")
    current = run / "current"
    current.mkdir()
    monkeypatch.chdir(current)
    number = current.stat().st_ino
    export(run, "solver", Path(), print, adapter=True)
    assert current.stat().st_ino == number
    assert [path.name for path in Path().iterdir()] == ["adapter_config.json"]
