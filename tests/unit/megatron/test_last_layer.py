"""Last layer on a CPU: only tokens that predict a label pass through its MLP."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from tests.support import ranks, reference

PROMPT = (1, 2, 3, 4, 5)
REPLIES = ((6, 7, 9), (6, 7, 10))


def test_only_predicting_tokens_pass_through_the_last_mlp(tmp_path: Path, one_rank: None) -> None:
    model = reference.make_model("qwen2", tmp_path)
    template = next(sample for sample in reference.make_samples() if sample.trained is None)
    samples = [
        replace(
            template,
            trajectory=str(number),
            prompt_ids=PROMPT,
            completion_ids=reply,
            temperature=1.0,
            advantages=(1.0,) * len(reply),
            behaviour=(-4.0,) * len(reply),
            routing=b"",
        )
        for number, reply in enumerate(REPLIES)
    ]
    (batch,) = pack(samples, 100, share=False)
    assert len(batch.token_ids) == 14  # the last token of a reply predicts nothing, and is left out
    assert len(batch.labels) == 6

    trainer = MegatronTrainer(ranks.make_spec(str(tmp_path)))
    mlp_tokens: list[int] = []

    def record_tokens(_module: Any, inputs: tuple[Tensor, ...], _output: Any) -> None:
        mlp_tokens.append(len(inputs[0]))

    for layer in trainer.model.stages[0].decoder.layers:
        layer.mlp.register_forward_hook(record_tokens)
    scores = trainer.score([batch])[0]

    # In each sequence, the last token of the prompt and two tokens of the reply predict labels.
    assert mlp_tokens[-1] == 6
    assert set(mlp_tokens[:-1]) == {14}
    expected = []
    for reply in REPLIES:
        logits = model(torch.tensor([(*PROMPT, *reply[:-1])])).logits[0]
        logprobs = logits[len(PROMPT) - 1 :].log_softmax(-1)
        expected += [logprobs[i, token] for i, token in enumerate(reply)]
    torch.testing.assert_close(scores, torch.stack(expected).detach(), atol=1e-5, rtol=0)
