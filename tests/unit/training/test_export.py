"""What cannot be exported is refused in one line, before anything is written."""

from pathlib import Path

import pytest
import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.training.export import ExportError, export


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has not been trained yet: one of its policies has an adapter, one is frozen."""
    settings = ["+policies.solver.lora={rank: 2, alpha: 4}", "+agents.verifier.loss_weight=0"]
    folder = tmp_path / "demo_math"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(resolve(["experiment=demo_math", *settings])))
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
    with pytest.raises(ExportError, match=r"demo_math: something is there already; name a folder that is empty"):
        export(run, "solver", run, print)


def test_a_policy_without_adapters_has_none_to_export(run: Path) -> None:
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["policies"]["solver"]["lora"] = None
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ExportError, match=r"trains all weights and has no adapter; leave out --adapter"):
        export(run, "solver", run / "out", print, adapter=True)


def test_a_finished_model_is_copied(run: Path) -> None:
    adapter = run / "train" / "models" / "solver" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter.parent / "config.json").write_text("[]")
    (run / "train" / "done.json").write_text("{}")
    notes: list[str] = []
    (run / "whole").mkdir()
    export(run, "solver", run / "whole", notes.append)
    export(run, "solver", run / "alone", notes.append, adapter=True)
    assert notes == [f"solver from {adapter.parent}", f"solver from {adapter}"]
    assert (run / "whole" / "config.json").read_text() == "[]"
    assert [path.name for path in (run / "alone").iterdir()] == ["adapter_config.json"]
