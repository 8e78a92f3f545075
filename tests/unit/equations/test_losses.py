"""Per-token losses, and the objectives made of them, by hand."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcore_mas.equations.losses import (
    LOSSES,
    Objective,
    TokenBatch,
    ValueObjective,
    cross_entropy,
    explained_variance,
    gspo,
    ppo_clip,
    reinforce,
    token_weights,
)

OLD = -1.0  # every old log-probability


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(ratios: list[float], advantages: list[float], **columns: Any) -> TokenBatch:
    """Return tokens whose probabilities are `ratios` times those of the sampler."""
    n = len(ratios)
    zeros = torch.zeros(n, dtype=torch.float64)
    default_columns: dict[str, Any] = {
        "logprobs": doubles(*(math.log(r) + OLD for r in ratios)).requires_grad_(),
        "behaviour": torch.full((n,), OLD, dtype=torch.float64),
        "advantages": doubles(*advantages),
        "sequences": torch.zeros(n, dtype=torch.int64),
        "entropy": zeros,
        "kl_coef": zeros,
        "entropy_coef": zeros,
    }
    return TokenBatch(**default_columns | columns)


def gradient(loss: Tensor, at: TokenBatch) -> list[float]:
    (result,) = torch.autograd.grad(loss.sum(), at.logprobs)
    return result.tolist()


def test_ppo_clip_by_hand() -> None:
    batch = tokens([1.0, 1.5, 0.5, 1.5, 0.5, 4.0], [2.0, 2.0, 2.0, -1.0, -1.0, -1.0])
    loss, statistics = ppo_clip(batch, batch.behaviour, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    # -rA; clipped above at 1.3; not clipped below for A > 0; A < 0: max(-rA, -clip(r)A), at most 3|A|
    assert loss.tolist() == pytest.approx([-2.0, -2.6, -1.0, 1.5, 0.8, 3.0])
    assert statistics["clip_fraction"].tolist() == [0, 1, 0, 0, 1, 0]
    assert statistics["clip_fraction_high"].tolist() == [0, 1, 0, 0, 0, 0]
    assert statistics["clip_fraction_low"].tolist() == [0, 0, 0, 0, 1, 0]
    assert statistics["clip_fraction_dual"].tolist() == [0, 0, 0, 0, 0, 1]
    # no gradient where a clip is active
    assert gradient(loss, batch) == pytest.approx([-2.0, 0, -1.0, 1.5, 0, 0])


def test_the_distance_to_the_old_policy_by_hand() -> None:
    ratios = [1.0, 1.5, 0.5]
    batch = tokens(ratios, [1.0, 1.0, 1.0])
    _, statistics = ppo_clip(batch, batch.behaviour)
    # the old policy sampled: k3 of KL(π_old‖π) is r − 1 − log r
    assert statistics["kl"].tolist() == pytest.approx([r - 1 - math.log(r) for r in ratios])
    for name in ("ratio", "ratio_max", "ratio_min"):
        assert statistics[name].tolist() == pytest.approx(ratios)
    assert not any(value.requires_grad for value in statistics.values())


def test_the_distance_is_a_divergence_in_expectation() -> None:
    old = doubles(0.5, 0.3, 0.2).log()
    new = doubles(0.2, 0.2, 0.6).log()
    _, statistics = ppo_clip(replace(tokens([1.0] * 3, [0.0] * 3), logprobs=new), old)
    divergence = sum(p * math.log(p / q) for p, q in ((0.5, 0.2), (0.3, 0.2), (0.2, 0.6)))
    assert float((old.exp() * statistics["kl"]).sum()) == pytest.approx(divergence)


@pytest.mark.parametrize("name", ["reinforce", "ppo_clip", "gspo"])
def test_on_policy_every_loss_is_the_policy_gradient(name: str) -> None:
    batch = tokens([1.0, 1.0], [0.5, -3.0])
    loss, _ = LOSSES[name](batch, batch.logprobs.detach())
    assert gradient(loss, batch) == pytest.approx([-0.5, 3.0])


def test_reinforce_has_no_ratio() -> None:
    batch = tokens([4.0, 0.5], [2.0, -1.0])
    loss, statistics = reinforce(batch, batch.behaviour)
    assert loss.tolist() == pytest.approx([-2 * (math.log(4) - 1), -math.log(2) - 1])
    assert gradient(loss, batch) == pytest.approx([-2.0, 1.0])
    assert statistics["ratio"].tolist() == pytest.approx([4.0, 0.5])


def test_gspo_clips_whole_replies() -> None:
    # reply 0: ratios (4, 1) with s = 2; reply 1: (0.25, 1) with s = 1/2, interleaved
    batch = tokens(
        [4.0, 0.25, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], sequences=torch.tensor([0, 1, 0, 1])
    )
    loss, statistics = gspo(batch, batch.behaviour, clip_low=0.2, clip_high=0.2)
    assert loss.tolist() == pytest.approx([-1.2, -0.5, -1.2, -0.5])
    assert statistics["clip_fraction_high"].tolist() == [1, 0, 1, 0]
    assert statistics["ratio"].tolist() == pytest.approx([2.0, 0.5, 2.0, 0.5])
    # −s_i A for each token that is not clipped, whatever its own ratio
    assert gradient(loss, batch) == pytest.approx([0, -0.5, 0, -0.5])


def test_gspo_has_a_dual_clip() -> None:
    batch = tokens([4.0], [-1.0])
    assert gspo(batch, batch.behaviour)[0].tolist() == pytest.approx([4.0])
    assert gspo(batch, batch.behaviour, dual_clip=3.0)[0].tolist() == pytest.approx([3.0])


@given(
    log_ratios=st.lists(st.floats(-0.3, 0.3), min_size=2, max_size=8),
    length=st.integers(1, 7),
    advantages=st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
)
def test_gspo_by_token_is_gspo_by_sequence(
    log_ratios: list[float], length: int, advantages: tuple[float, float]
) -> None:
    length = min(length, len(log_ratios) - 1)
    lengths = [length, len(log_ratios) - length]
    sequences = torch.tensor([0, 1]).repeat_interleave(torch.tensor(lengths))
    batch = tokens(
        [math.exp(x) for x in log_ratios],
        [advantages[i] for i in sequences.tolist()],
        sequences=sequences,
    )
    by_token, _ = gspo(batch, batch.behaviour, clip_low=0.1, clip_high=0.15)
    weights = token_weights(torch.tensor(lengths), mode="seq_mean_token_mean")[sequences]
    # eq. 5 of the paper: mean over replies of min(s A, clip(s) A), s = exp(mean log ratio)
    log_ratio = batch.logprobs - batch.behaviour
    s = torch.stack([log_ratio[sequences == i].mean() for i in (0, 1)]).exp()
    by_sequence = (
        -torch.minimum(s * doubles(*advantages), s.clamp(0.9, 1.15) * doubles(*advantages)) / 2
    )
    assert (by_token * weights).sum().item() == pytest.approx(by_sequence.sum().item())
    assert gradient(by_token * weights, batch) == pytest.approx(
        gradient(by_sequence, batch), abs=1e-12
    )


def test_cross_entropy_is_the_negative_log_likelihood() -> None:
    batch = tokens([1.0, math.e], [0.0, 0.0])
    loss, statistics = cross_entropy(batch, batch.behaviour)
    assert loss.tolist() == pytest.approx([1.0, 0.0])
    assert statistics == {}


def test_an_objective_without_correction_starts_from_the_sampler() -> None:
    batch = tokens([1.5], [2.0], proximal=doubles(OLD + 5))
    loss, statistics = Objective()(batch)
    assert loss.tolist() == pytest.approx([-2.4])
    assert statistics["ratio"].tolist() == pytest.approx([1.5])
    assert not [name for name in statistics if name.startswith("correction")]


def test_decoupled_ppo_by_hand() -> None:
    # π/μ = 3 is π/π_old = 1.5, which is clipped to 1.2, times π_old/μ = 2, the weight
    batch = tokens([3.0, 1.0], [1.0, 1.0], proximal=doubles(OLD + math.log(2), OLD))
    loss, statistics = Objective(correction="importance")(batch)
    assert loss.tolist() == pytest.approx([-2 * 1.2, -1.0])
    assert statistics["ratio"].tolist() == pytest.approx([1.5, 1.0])
    assert statistics["correction_weight"].tolist() == pytest.approx([2.0, 1.0])
    assert statistics["correction_masked"].tolist() == [0, 0]
    assert gradient(loss, batch) == pytest.approx([0, -1.0])


def test_the_first_update_of_a_step_is_weighted_policy_gradient() -> None:
    batch = tokens([3.0, 1.5], [1.0, 1.0])
    loss, statistics = Objective(correction="importance")(batch)
    assert statistics["ratio"].tolist() == [1.0, 1.0]
    assert gradient(loss, batch) == pytest.approx([-3.0, -1.5])
    # a token whose proximal is NaN takes the current policy, too
    with_nan = replace(batch, proximal=doubles(math.nan, math.nan))
    assert gradient(Objective(correction="importance")(with_nan)[0], batch) == pytest.approx(
        [-3.0, -1.5]
    )


def test_importance_weighted_reinforce_is_the_unclipped_ratio() -> None:
    batch = tokens([3.0, 0.25], [1.0, -2.0])
    weighted, _ = Objective(loss="reinforce", correction="importance")(batch)
    plain = -(batch.logprobs - batch.behaviour).exp() * batch.advantages
    assert gradient(weighted, batch) == pytest.approx(gradient(plain, batch))


def test_masked_tokens_have_no_policy_gradient_but_keep_kl_and_entropy() -> None:
    batch = tokens(
        [9.0, 1.0],
        [1.0, 1.0],
        reference=doubles(OLD, OLD),
        kl_coef=doubles(0.5, 0.0),
        entropy=doubles(2.0, 2.0),
        entropy_coef=doubles(0.25, 0.0),
    )
    loss, statistics = Objective(correction="icepop", kl="k2")(batch)
    # β · d²/2 − 0.25 · 2, and −A
    assert loss.tolist() == pytest.approx([0.25 * math.log(9) ** 2 - 0.5, -1.0])
    assert gradient(loss, batch) == pytest.approx([0.5 * math.log(9), -1.0])
    assert statistics["correction_masked"].tolist() == [1, 0]
    assert statistics["correction_weight_max"].tolist() == pytest.approx([0, 1])


def test_correction_options_reach_the_correction() -> None:
    batch = tokens([9.0, 1.0], [1.0, 1.0])
    _, statistics = Objective(
        correction="tis", correction_options={"high": 2.5, "level": "geometric"}
    )(batch)
    assert statistics["correction_weight"].tolist() == pytest.approx([2.5, 2.5])


def test_the_kl_term_by_hand() -> None:
    batch = tokens([2.0, 2.0], [0.0, 0.0], reference=doubles(OLD, OLD), kl_coef=doubles(0.1, 0.2))
    d = math.log(2)
    for kind, value, slope in (
        ("k1", d, 1.0),
        ("k2", d**2 / 2, d),
        ("k3", 0.5 - 1 + d, 0.5),
        ("k3+", d - 0.5, d),
    ):
        loss, statistics = Objective(kl=kind)(batch)
        assert loss.tolist() == pytest.approx([0.1 * value, 0.2 * value])
        assert gradient(loss, batch) == pytest.approx([0.1 * slope, 0.2 * slope])
        assert statistics["reference_kl"].tolist() == pytest.approx([value, value])


def test_the_entropy_bonus_pulls() -> None:
    entropy = doubles(1.0, 2.0).requires_grad_()
    batch = tokens([1.0, 1.0], [0.0, 0.0], entropy=entropy, entropy_coef=doubles(0.0, 0.5))
    loss, _ = Objective()(batch)
    assert loss.tolist() == [0.0, -1.0]
    assert torch.autograd.grad(loss.sum(), entropy)[0].tolist() == [0.0, -0.5]


def test_a_missing_reference_does_no_harm_where_the_coefficient_is_zero() -> None:
    batch = tokens(
        [2.0, 2.0], [1.0, 1.0], reference=doubles(OLD, math.nan), kl_coef=doubles(0.1, 0.0)
    )
    loss, statistics = Objective()(batch)
    assert loss.isfinite().all()
    assert all(math.isfinite(slope) for slope in gradient(loss, batch))
    assert statistics["reference_kl"].isnan().tolist() == [False, True]


def test_a_missing_reference_gives_nan_or_an_error_where_one_is_needed() -> None:
    one_missing = tokens(
        [2.0, 2.0], [1.0, 1.0], reference=doubles(OLD, math.nan), kl_coef=doubles(0.1, 0.1)
    )
    assert Objective()(one_missing)[0].isnan().tolist() == [False, True]
    with pytest.raises(ValueError, match="kl_coef is not zero, but no token has reference"):
        Objective()(tokens([2.0], [1.0], kl_coef=doubles(0.1)))


@pytest.mark.parametrize("correction", ["none", "importance", "tis", "mis", "icepop"])
def test_supervised_tokens_need_no_sampler(correction: str) -> None:
    batch = tokens([1.0, 0.5], [0.0, 0.0], behaviour=doubles(math.nan, math.nan))
    loss, _ = Objective(loss="cross_entropy", correction=correction)(batch)
    assert loss.tolist() == pytest.approx([1.0, 1.0 + math.log(2)])
    assert gradient(loss, batch) == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("objective", "is_by_token"),
    [
        *((Objective(loss=loss), True) for loss in ("cross_entropy", "reinforce", "ppo_clip")),
        (Objective(loss="gspo"), False),
        (Objective(correction="importance"), True),
        (Objective(correction="tis"), True),
        (Objective(correction="tis", correction_options={"level": "geometric"}), False),
        (Objective(correction="tis", correction_options={"veto": 1e-1}), False),
        (Objective(correction="mis"), False),
        (Objective(correction="mis", correction_options={"level": "token"}), True),
        (Objective(correction="icepop"), True),
    ],
)
def test_a_loss_by_token_does_not_depend_on_the_other_tokens(
    objective: Objective, is_by_token: bool
) -> None:
    """The first of two tokens of a reply keeps its gradient if the second one changes."""
    gradients = []
    for other_ratio in (1.0, 0.05):
        batch = tokens([0.9, other_ratio], [2.0, 1.0], kl_coef=doubles(0.1, 0.1))
        batch = replace(batch, reference=doubles(OLD - 0.5, OLD), entropy_coef=doubles(0.1, 0.1))
        loss, _ = objective(batch)
        gradients.append(gradient(loss, batch)[0])
    assert objective.is_by_token == is_by_token
    assert (gradients[0] == gradients[1]) == is_by_token


def test_an_objective_is_plain_data() -> None:
    objective = Objective(loss="gspo", options={"clip_low": 1e-3}, kl="k2", correction="tis")
    assert copy.deepcopy(objective) == objective  # what pickling does, too
    assert replace(objective, kl="k3").options == {"clip_low": 1e-3}


def test_the_critics_loss_by_hand() -> None:
    values = doubles(1.0, 2.0, 2.0, 0.0).requires_grad_()
    old = doubles(1.0, 1.0, 1.0, 1.0)
    returns = doubles(3.0, 3.0, 1.0, 3.0)
    loss, statistics = ValueObjective(clip=0.5)(values, old, returns)
    # clipped values 1, 1.5, 1.5, 0.5: ½ max(2², 2²), ½ max(1², 1.5²), ½ max(1², 0.5²), ½ max(3², 2.5²)
    assert loss.tolist() == pytest.approx([2.0, 1.125, 0.5, 4.5])
    assert statistics["value_clip_fraction"].tolist() == [0, 1, 0, 0]
    # V − R, and 0 where the clipped value is further from the return
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == pytest.approx(
        [-2.0, 0.0, 1.0, -3.0]
    )


def test_a_critic_without_clip_is_regression() -> None:
    loss, _ = ValueObjective(clip=math.inf)(doubles(5.0), doubles(0.0), doubles(2.0))
    assert loss.tolist() == [4.5]


def test_explained_variance_by_hand() -> None:
    def explained(values: list[float], returns: list[float]) -> float:
        _, statistics = ValueObjective()(doubles(*values), doubles(*values), doubles(*returns))
        return explained_variance({name: float(value.mean()) for name, value in statistics.items()})

    assert explained([1.0, 3.0], [1.0, 3.0]) == pytest.approx(1.0)
    assert explained([2.0, 2.0], [1.0, 3.0]) == pytest.approx(0.0)
    assert explained([1.0, 2.0], [1.0, 3.0]) == pytest.approx(
        0.75
    )  # errors 0, 1: variance 1/4 of the returns' 1
    assert math.isnan(explained([1.0, 2.0], [3.0, 3.0]))
