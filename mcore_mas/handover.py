"""New weights from a policy's trainer into its engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rollout.engines.protocol import EngineError

if TYPE_CHECKING:
    from mcore_mas.megatron.gang import Gang
    from rollout.engines.protocol import TrainedEngine


async def hand_over(trainer: Gang, engine: TrainedEngine, version: int) -> dict[str, float]:
    """Have `engine` serve the trainer's present weights as `version`; returns what that took.

    Raises:
        EngineError: they did not arrive, or not bit for bit.
    """
    began = time.perf_counter()
    route = await engine.route()
    starts = engine.starts
    try:
        handover = await trainer.export(route, version)
    except EngineError:
        route = await engine.route()  # starts again what has died
        if engine.starts == starts:
            raise
        handover = await trainer.export(route, version)
    await engine.load_weights_from(handover)
    return {
        "hand_over_s": time.perf_counter() - began,
        "hand_over_mb": handover.bytes / 1e6,
        "engine_pause_s": engine.pause_s,
    }
