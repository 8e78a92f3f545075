"""Advantages of on-policy distillation: by hand, and the gradient of the reverse KL divergence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mcore_mas.config.policy import TeacherConfig
from mcore_mas.credit.assign import add_teacher_advantages, teacher_kl
from mcore_mas.credit.samples import Sample
from mcore_mas.equations.losses import Objective, TokenBatch

# The student samples its two tokens with probabilities 1/2 and 1/4; to the teacher they have 1 and 1/8.
SAMPLE = Sample(
    policy="student",
    agent="solver",
    task="t",
    trajectory="t/0",
    turn=0,
    prompt_ids=(1,),
    completion_ids=(2, 3),
    behaviour=(math.log(0.5), math.log(0.25)),
    teacher=(math.log(1.0), math.log(0.125)),
    advantages=(0.5, 0.5),
)


def test_two_tokens_beside_the_reward() -> None:
    config = TeacherConfig(policy="teacher", coef=2.0)
    (sample,) = add_teacher_advantages([SAMPLE], {"student": config})
    # 0.5 + 2 (log 1 - log 1/2) and 0.5 + 2 (log 1/8 - log 1/4)
    ln2 = math.log(2)
    assert sample.advantages == pytest.approx((0.5 + 2 * ln2, 0.5 - 2 * ln2))


def test_two_tokens_of_the_teacher_alone() -> None:
    config = TeacherConfig(policy="teacher", alone=True)
    (sample,) = add_teacher_advantages([SAMPLE], {"student": config})
    assert sample.advantages == pytest.approx((math.log(2), -math.log(2)))


def test_samples_without_a_teacher_stay_as_they_are() -> None:
    other = replace(SAMPLE, policy="other")
    masked = replace(SAMPLE, teacher=None, advantages=())
    teachers = {"student": TeacherConfig(policy="teacher")}
    assert add_teacher_advantages([other, masked], teachers) == [other, masked]


def test_the_metric_is_the_mean_of_log_pi_minus_log_rho() -> None:
    # (log 1/2 - log 1) and (log 1/4 - log 1/8) cancel; with the first token alone it is -log 2
    assert teacher_kl([SAMPLE]) == pytest.approx(0.0)
    first = replace(SAMPLE, completion_ids=(2,), behaviour=(math.log(0.5),), teacher=(0.0,))
    assert teacher_kl([first]) == pytest.approx(-math.log(2))


@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip", "gspo"])
def test_the_expected_gradient_is_that_of_the_reverse_kl_divergence(loss: str) -> None:
    """Enumerate a vocabulary of four tokens, each weighed by the probability to sample it."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    teacher_logits = torch.tensor([1.0, 0.5, -0.7, 0.2], dtype=torch.float64)
    logprobs = logits.log_softmax(0)
    teacher_logprobs = teacher_logits.log_softmax(0)

    # dKL/dz_i = p_i (log p_i - log q_i - KL)
    p = logprobs.detach().exp()
    difference = logprobs.detach() - teacher_logprobs
    divergence = (p * difference).sum()
    expected = p * (difference - divergence)

    samples = [
        replace(
            SAMPLE,
            turn=token,
            completion_ids=(token,),
            behaviour=(float(logprobs.detach()[token]),),
            teacher=(float(teacher_logprobs[token]),),
            advantages=(123.0,),  # of the reward, which does not count
        )
        for token in range(4)
    ]
    config = TeacherConfig(policy="teacher", alone=True)
    scored = add_teacher_advantages(samples, {"student": config})
    advantages = torch.tensor([sample.advantages or () for sample in scored], dtype=torch.float64)
    batch = TokenBatch(
        logprobs=logprobs,
        behaviour=logprobs.detach(),
        advantages=advantages[:, 0],
        sequences=torch.arange(4),
        entropy=torch.zeros(4, dtype=torch.float64),
        kl_coef=None,
        entropy_coef=torch.zeros(4, dtype=torch.float64),
    )
    token_losses, _ = Objective(loss=loss)(batch)
    (p * token_losses).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected)
