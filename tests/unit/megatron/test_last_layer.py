"""On a CPU only tokens that predict something go through what follows the last layer's attention."""

from dataclasses import replace
from pathlib import Path

import torch

from mcore_mas.megatron.step.trainer import MegatronTrainer
from mcore_mas.packing.pack import pack
from tests.support import ranks, reference


def test_a_prompt_ends_at_the_last_layers_attention_but_for_its_last_token(
    tmp_path: Path, one_rank: None
) -> None:
    model = reference.make_model("qwen2", tmp_path)
    sample = next(s for s in reference.make_samples() if s.trained is None)
    prompt, reply = (1, 2, 3, 4, 5), (6, 7, 8)
    samples = [
        replace(
            sample,
            trajectory=str(number),
            prompt_ids=prompt,
            completion_ids=(*reply[:-1], number),
            temperature=1.0,
            advantages=(1.0,) * 3,
            behaviour=(-4.0,) * 3,
            routing=b"",
        )
        for number in (9, 10)
    ]
    (batch,) = pack(samples, 100, share=False)
    assert len(batch.token_ids) == 14 and len(batch.labels) == 6
    trainer = MegatronTrainer(ranks.make_spec(str(tmp_path)))
    seen: list[int] = []
    for layer in trainer.model.stages[0].decoder.layers:
        layer.mlp.register_forward_hook(lambda _, given, out: seen.append(len(given[0])))
    scores = trainer.score([batch])[0]
    # of 7 tokens of either sequence the prompt's last and two of the reply predict
    assert seen[-1] == 6 and set(seen[:-1]) == {14}
    logits = model(torch.tensor([(*prompt, *reply[:-1])])).logits[0, 4:].log_softmax(-1)
    theirs = [
        logits[place, token]
        for number in (9, 10)
        for place, token in enumerate((*reply[:-1], number))
    ]
    torch.testing.assert_close(scores, torch.stack(theirs).detach(), atol=1e-5, rtol=0)
