"""Measure every row and write docs/exactness.md: `make exactness`."""

import sys
import tempfile
from pathlib import Path

from tests.exactness.repeats import REPEATS, jobs, same, table
from tests.exactness.rows import ROWS, STEPS, TOLERANCE, Errors, Row, measure, run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exactness.md"
HEAD = f"""# Exactness

Written by `make exactness`; part of it is asserted by `make test`. Every row trains a tiny model in float32 for {STEPS}
optimizer steps with Megatron and, from the same weights on the same samples, as a plain Hugging Face model under plain
torch (one sequence at a time, AdamW, clipping at 1), in float64, norms and routers too: in float32 that is itself 1e-6
from the truth. The numbers are the largest relative errors over all steps; at most {TOLERANCE:.0e} is allowed. In every
row, the weights that were loaded must come back bit for bit before the first step, and all ranks must report the same
metrics.

- *loss*, *norm*, *agent norms*: of the update's loss, of the whole gradient, of each agent's own gradient.
- *gradients*: of one tensor, |g − ĝ|₂ / |ĝ|₂, clipped; a tensor with less than 1% of the whole norm is measured against
  that 1% (the true gradient of a key bias is 0).
- *parameters*: of one tensor after the step, |p − p̂|∞ / |p̂|∞.

The samples are two agents' prompts with ragged replies, some sharing a prompt, and a dialogue with untrained tokens;
in rows of depth 3 they are turns whose sequences share two stretches one below the other, among them a turn that goes
on from another, a reply of one token and twins. Unless a row says otherwise what they begin with in common is stored
once, micro-batches hold about 16 tokens, or 64 at depth 3 and more where context parallelism is alone, and there are
as many as the layout can use. Models are Qwen2 with tied embeddings unless named. LoRA trains random adapters of rank
3, of all projections unless some are named; its *parameters* are the merged weights and the adapters, of which the
latter come back bit for bit. Not listed, as they are beyond the tolerance or at its edge: Qwen3 under CP2 comes to
2.1e-6, in the query weights of one layer at the third step; a Qwen3-MoE on trees of depth 3 under DP2 × EP2, and with
LoRA on its attention on one rank, to 2.0e-6. It is rounding: the plain model in float32, on Qwen3's batch in five
orders, is itself 1.7e-6 to 1.9e-6 from float64.

| row | ranks | loss | norm | agent norms | gradients | parameters |
|---|---|---|---|---|---|---|
"""


def line(row: Row, errors: Errors) -> str:
    """One line of the table."""
    numbers = (errors.loss, errors.norm, errors.agent_norms, errors.gradients, errors.parameters)
    return f"| {row.name} | {row.ranks} | " + " | ".join(f"{number:.1e}" for number in numbers) + " |\n"


def main() -> int:
    """Measure, print and write; 1 if a row is too far from the reference."""
    with tempfile.TemporaryDirectory() as folder:
        run(ROWS, Path(folder), jobs(REPEATS, Path(folder)))
        measured = list(zip(ROWS, measure(ROWS, Path(folder)), strict=True))
        repeated = same(REPEATS, Path(folder))
    rows = "".join(line(row, errors) for row, errors in measured) + table(REPEATS, repeated)
    print(rows, end="")
    PAGE.write_text(HEAD + rows)
    far = [row.name for row, errors in measured if errors.worst > TOLERANCE]
    if far:
        print(f"more than {TOLERANCE:.0e} from the reference: {', '.join(far)}", file=sys.stderr)
    different = [repeat.name for repeat, row in zip(REPEATS, repeated, strict=True) if not all(row)]
    if different:
        print(f"not the same bits: {', '.join(different)}", file=sys.stderr)
    return 1 if far or different else 0


if __name__ == "__main__":
    sys.exit(main())
