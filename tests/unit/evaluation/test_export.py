"""What cannot be exported is refused in one line, before anything is written."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_mas.config.compose import resolve
from mcore_mas.evaluation.export import ExportError, export
from mcore_mas.pipeline.base_model import make_tiny_model
from rollout.models.chat_template import Renderer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has not been trained yet: one of its policies has an adapter, one is frozen."""
    settings = ["+policies.solver.lora={rank: 2, alpha: 4}", "+agents.verifier.loss_weight=0"]
    folder = tmp_path / "demo_math"
    folder.mkdir()
    (folder / "config.yaml").write_text(
        yaml.safe_dump(resolve(["experiment=demo_math", *settings]))
    )
    return folder


@pytest.mark.parametrize(
    ("policy", "adapter", "message"),
    [
        ("solvr", False, "no policy 'solvr'; policies: solver, verifier"),
        ("verifier", False, "policy 'verifier' is frozen; it is "),
        ("solver", True, "no finished model and no valid checkpoint; train it first"),
    ],
)
def test_what_is_not_there_is_named(run: Path, policy: str, adapter: bool, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export(run, policy, run / "out", print, adapter=adapter)
    assert not (run / "out").exists()


def test_nothing_is_overwritten(run: Path) -> None:
    with pytest.raises(
        ExportError, match=r"demo_math: something is there already; name a folder that is empty"
    ):
        export(run, "solver", run, print)


def test_a_policy_without_adapters_has_none_to_export(run: Path) -> None:
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["policies"]["solver"]["lora"] = None
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(
        ExportError, match=r"trains all weights and has no adapter; leave out --adapter"
    ):
        export(run, "solver", run / "out", print, adapter=True)


@pytest.mark.parametrize(("family", "written"), [("Qwen2-own", "llama"), ("Qwen3-own", "qwen3")])
def test_others_read_an_export_as_the_run_does(
    run: Path, tmp_path: Path, family: str, written: str
) -> None:
    """transformers replaces the pre-tokeniser of any Qwen2: the demo's export answered 0 of 12 tasks."""
    model = run / "train" / "models" / "solver"
    make_tiny_model(tmp_path / family)
    shutil.copytree(tmp_path / family, model)
    (run / "train" / "done.json").write_text("{}")
    text = "Check 384+77 step by step. <verify>approve</verify>\n\n<answer>Alice</answer>"
    ids = Renderer(model).encode(text)
    swapped = AutoTokenizer.from_pretrained(str(model)).encode(
        text, add_special_tokens=False
    ) != list(ids)
    assert swapped is (written == "llama")
    notes: list[str] = []
    export(run, "solver", run / "whole", notes.append)
    assert notes[0] == f"solver from {model}"
    assert (
        notes[-1]
        == "checked: ids of 2 texts and log-probabilities of 16 tokens are those of transformers"
    )
    assert json.loads((run / "whole" / "config.json").read_text())["model_type"] == written
    assert AutoTokenizer.from_pretrained(str(run / "whole")).encode(
        text, add_special_tokens=False
    ) == list(ids)
    before, after = (
        AutoModelForCausalLM.from_pretrained(str(folder)).eval()
        for folder in (model, run / "whole")
    )
    logits = [own(torch.tensor([ids])).logits for own in (before, after)]
    assert torch.equal(*logits)


def test_an_export_that_others_would_read_wrongly_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = run / "train" / "models" / "solver"
    make_tiny_model(tmp_path / "Qwen3-own")
    shutil.copytree(tmp_path / "Qwen3-own", model)
    (run / "train" / "done.json").write_text("{}")
    monkeypatch.setattr(
        "mcore_mas.evaluation.export._answers", lambda folder, prompts: [((5,), (-0.1,))]
    )
    with pytest.raises(
        ExportError, match=r"log-probabilities in transformers are \S+ nats from the run's"
    ):
        export(run, "solver", run / "whole", print)


def test_an_adapter_is_copied(run: Path) -> None:
    adapter = run / "train" / "models" / "solver" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (run / "train" / "done.json").write_text("{}")
    notes: list[str] = []
    export(run, "solver", run / "alone", notes.append, adapter=True)
    assert notes == [f"solver from {adapter}"]
    assert [path.name for path in (run / "alone").iterdir()] == ["adapter_config.json"]
