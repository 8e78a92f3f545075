"""Training step of one policy on its ranks."""

import mcore_mas.megatron.patches  # noqa: F401  before what is here imports Megatron
