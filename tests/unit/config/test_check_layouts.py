"""Layouts that do not fit a policy's model are refused before a run starts, with the nearest valid size."""

from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.models import check_model
from mcore_mas.config.run import ConfigError, RunConfig
from rollout.base.errors import ModelError
from tests.support import reference


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with 6 layers, 4 heads, 2 key/value heads and 4096 positions."""
    folder = tmp_path_factory.mktemp("model")
    reference.make_model("qwen2", folder, layers=6)
    return folder


def config(model: Path, *overrides: str) -> RunConfig:
    models = [f"policies.{policy}.model={model}" for policy in ("solver", "verifier")]
    values = resolve(["experiment=demo_math", *models, "policies.solver.tp=1", *overrides])
    return RunConfig.from_values(values, "a test")


def check_layouts(config: RunConfig) -> None:
    """Check the layouts of all policies, as a training does."""
    for name, folder in config.models.items():
        check_model(config, name, Path(folder))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["+policies.solver.overrides.engine.router_replay=true"],
            "engine.router_replay is for mixtures of experts, and {model} is dense; set policies.solver."
            "overrides.engine.router_replay: false",
        ),
        (
            ["policies.solver.tp=3"],
            "tp: 3 does not divide the model's 4 heads; valid here: [1, 2], nearest: 2",
        ),
        (
            ["policies.solver.tp=4"],
            "tp: 4 does not divide the model's 2 key/value heads; valid here: [1, 2], nearest: 2",
        ),
        (
            ["policies.solver.tp=2", "+policies.solver.cp=4"],
            "cp: 4 does not divide the 2 heads that tp: 2 leaves to each rank; valid here: [1, 2], nearest: 2",
        ),
        (
            ["+policies.solver.layers=te"],
            "layers: te runs on GPUs only, and cluster.device is cpu; use layers: local, or cluster.device: auto",
        ),
        (
            ["+policies.solver.cp=3"],
            "cp: 3 does not divide the 4 heads that tp: 1 leaves to each rank; valid here: [1, 2, 4], nearest: 2",
        ),
        (
            ["+policies.solver.pp=4"],
            "pp: 4 does not divide the model's 6 layers; valid here: [1, 2, 3, 6], nearest: 3",
        ),
        (
            ["+policies.solver.pp=2", "+policies.solver.vpp=4"],
            "pp · vpp: 2 · 4 does not divide the model's 6 layers; valid here: [1, 2, 3, 6], nearest: 6",
        ),
        (
            ["+policies.solver.vpp=2"],
            "vpp: 2 stages on each pipeline rank need pp of 2 or more; use vpp: 1, or pp: 2",
        ),
        (
            ["+policies.solver.sp=true"],
            "sp: sequence parallelism needs tp of 2 or more; use sp: false, or tp: 2",
        ),
        (
            ["engine.max_length=5000", "trainer.microbatch_tokens=8192"],
            "engine.max_length 5000 is more than the 4096 positions of {model}; use at most 4096",
        ),
    ],
)
def test_an_invalid_layout_is_refused_in_one_line(
    model: Path, overrides: list[str], line: str
) -> None:
    with pytest.raises(ModelError) as caught:
        check_layouts(config(model, *overrides))
    assert str(caught.value) == f"policies.solver: {line.format(model=model)}"


def test_a_valid_layout_passes(model: Path) -> None:
    """The vocabulary of 101 is padded for tp, and any number of data-parallel ranks is valid."""
    sizes = ["cp=2", "pp=3", "vpp=2", "sp=true", "dp=5"]
    overrides = ["policies.solver.tp=2", *(f"+policies.solver.{size}" for size in sizes)]
    check_layouts(config(model, *overrides, "engine.max_length=4096"))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "trainer.microbatch_tokens=100",
            "trainer.microbatch_tokens 100 has no room for one sequence of engine.max_length 512; "
            "use microbatch_tokens: 512, or max_length: 100",
        ),
        (
            "+policies.verifier.overlap=true",
            "policies.verifier: overlap: one data-parallel rank exchanges nothing; leave overlap out, or use dp: 2",
        ),
        (
            "+policies.verifier.fp8=hybrid",
            "policies.verifier: fp8: hybrid needs Transformer Engine's layers and bfloat16; set layers: te and "
            "bf16: true",
        ),
    ],
)
def test_settings_that_no_model_allows_are_refused_with_the_config(
    model: Path, override: str, line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(model, override)
    assert str(caught.value).endswith(line)
