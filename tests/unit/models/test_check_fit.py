"""check_fit: layouts that cannot divide a model are refused with those that can."""

import re
from typing import Any

import pytest

from rollout.base.errors import ModelError
from rollout.models.layout import Fp8Recipe, ParallelLayout, check_fit
from tests.support.architectures import dense_architecture, mixture_architecture


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tp": 2, "pp": 3, "vpp": 2, "sp": True},
        {"tp": 4, "cp": 2, "dp": 5},
    ],
)
def test_a_layout_that_divides_a_dense_model_fits(sizes: dict[str, Any]) -> None:
    check_fit(dense_architecture(), ParallelLayout(**sizes))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tp": 8},
            "tp: 8 does not divide the model's 4 key/value heads; valid here: [1, 2, 4], nearest: 4",
        ),
        (
            {"tp": 3},
            "tp: 3 does not divide the model's 8 heads; valid here: [1, 2, 4], nearest: 2",
        ),
        (
            {"tp": 2, "cp": 3},
            "cp: 3 does not divide the 4 heads that tp: 2 leaves to each rank; "
            "valid here: [1, 2, 4], nearest: 2",
        ),
        (
            {"pp": 4},
            "pp: 4 does not divide the model's 6 layers; valid here: [1, 2, 3, 6], nearest: 3",
        ),
        (
            {"pp": 2, "vpp": 4},
            "pp · vpp: 2 · 4 does not divide the model's 6 layers; "
            "valid here: [1, 2, 3, 6], nearest: 6",
        ),
        (
            {"vpp": 2},
            "vpp: 2 stages on each pipeline rank need pp of 2 or more; use vpp: 1, or pp: 2",
        ),
        (
            {"sp": True},
            "sp: sequence parallelism needs tp of 2 or more; use sp: false, or tp: 2",
        ),
        (
            {"dp": 2, "ep": 2},
            "ep: 2 needs a mixture of experts, and this model has no experts; use ep: 1 "
            "(dp replicates the model)",
        ),
    ],
)
def test_a_layout_that_does_not_divide_a_dense_model_is_refused(
    sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        check_fit(dense_architecture(), ParallelLayout(**sizes))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "dp": 4, "ep": 4, "sp": True},
        {"dp": 3},
        # Context-parallel ranks have whole layers, too, and can share experts.
        {"dp": 2, "cp": 2, "ep": 4},
    ],
)
def test_a_layout_that_divides_a_mixture_fits(sizes: dict[str, Any]) -> None:
    check_fit(mixture_architecture(), ParallelLayout(**sizes))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"dp": 3, "ep": 3},
            "ep: 3 must divide the model's 8 experts, and the dp · cp = 3 ranks that share them; "
            "valid here: [1], nearest: 1",
        ),
        (
            {"dp": 4, "ep": 8},
            "ep: 8 must divide the model's 8 experts, and the dp · cp = 4 ranks that share them; "
            "valid here: [1, 2, 4], nearest: 4",
        ),
        (
            {"tp": 2},
            "tp: 2 on a mixture of experts needs sequence parallelism; use sp: true, or tp: 1",
        ),
        (
            {"tp": 32},
            "tp: 32 does not divide the model's 8 heads; valid here: [1, 2, 4], nearest: 4",
        ),
    ],
)
def test_a_layout_that_does_not_divide_a_mixture_is_refused(
    sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        check_fit(mixture_architecture(), ParallelLayout(**sizes))
    assert str(caught.value) == message


def test_experts_take_no_adapters() -> None:
    check_fit(mixture_architecture(), ParallelLayout(), targets=("q", "v"))
    expected = (
        "lora.targets: in a mixture of experts, up, down belong to the experts, which take no "
        "adapters; use targets: [q, k, v, o], or some of them"
    )
    with pytest.raises(ModelError, match=re.escape(expected)):
        check_fit(mixture_architecture(), ParallelLayout(), targets=("q", "up", "down"))


def test_a_router_that_cannot_learn_is_refused() -> None:
    with pytest.raises(ModelError, match="the router cannot learn"):
        check_fit(mixture_architecture(num_experts_per_tok=1), ParallelLayout())


@pytest.mark.parametrize(
    ("tp", "recipe", "message"),
    [
        (1, "tensorwise", ""),
        (1, "mxfp8", ""),
        (1, "blockwise", "needs multiples of 128, and the model's hidden width is 64 on each rank"),
        (4, "tensorwise", "needs multiples of 16, and the model's feed-forward width is 24 on"),
    ],
)
def test_fp8_needs_multiples(
    monkeypatch: pytest.MonkeyPatch, tp: int, recipe: Fp8Recipe, message: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    architecture = dense_architecture()
    layout = ParallelLayout(tp=tp)
    if not message:
        check_fit(architecture, layout, "te", fp8=recipe)
        return
    with pytest.raises(ModelError, match=f"fp8_recipe: {recipe} {message}"):
        check_fit(architecture, layout, "te", fp8=recipe)


def test_transformer_engine_must_be_installed_and_takes_no_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    architecture = dense_architecture()
    check_fit(architecture, ParallelLayout(), "local", ("q",))
    not_installed = "layers: te needs Transformer Engine, which is not installed here; use layers"
    with pytest.raises(ModelError, match=not_installed):
        check_fit(architecture, ParallelLayout(), "te")
    with pytest.raises(ModelError, match=r"lora cannot be used with layers: te, .* layers: local"):
        check_fit(architecture, ParallelLayout(), "te", ("q",))
