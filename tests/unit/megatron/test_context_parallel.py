"""Which tokens and rows of a micro-batch each context-parallel rank takes."""

from mcore_mas.credit.samples import Sample
from mcore_mas.packing.pack import pack


def test_a_rank_takes_consecutive_tokens_and_the_rows_they_predict() -> None:
    def sample(reply: tuple[int, ...]) -> Sample:
        ids = {"policy": "p", "agent": "a", "task": "t", "trajectory": "0", "turn": 0}
        return Sample(**ids, prompt_ids=(1, 2, 3), completion_ids=reply, weight=1.0)

    # tokens 1 2 3 4 and four that pad; 3 predicts 4 and 6, and 4 predicts 5
    (batch,) = pack([sample((4, 5)), sample((6,))], 100)
    assert batch.token_ids.tolist() == [1, 2, 3, 4]
    (first, first_rows), (last, last_rows) = (batch.padded(8).part(2, rank) for rank in (0, 1))
    assert (first.token_ids.tolist(), last.token_ids.tolist()) == ([1, 2, 3, 4], [0, 0, 0, 0])
    assert (first.position_ids.tolist(), last.position_ids.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert (first.predictors.tolist(), first.labels.tolist()) == ([2, 3, 2], [4, 5, 6])
    assert first_rows.tolist() == [0, 1, 2]
    # a rank whose tokens predict nothing takes no row
    assert (last.predictors.tolist(), last.labels.tolist(), last_rows.tolist()) == ([], [], [])
    second, second_rows = batch.part(2, 1)
    assert (second.token_ids.tolist(), second.position_ids.tolist()) == ([3, 4], [2, 3])
    assert (second.predictors.tolist(), second_rows.tolist()) == ([0, 1, 0], [0, 1, 2])
