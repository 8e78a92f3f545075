"""New weights from a policy's trainer into its engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rollout.base.errors import EngineError

if TYPE_CHECKING:
    from mcore_mas.megatron.step.trainer_group import TrainerGroup
    from rollout.engines.protocol import TrainedEngine
    from rollout.sync.protocol import WeightUpdate


async def hand_over(trainer: TrainerGroup, engine: TrainedEngine, version: int) -> dict[str, float]:
    """Have `engine` serve the trainer's present weights as `version`; returns what that took.

    Raises:
        EngineError: they did not arrive, or not bit for bit.
    """
    began = time.perf_counter()
    async with trainer.handing_over:  # to an engine that lost its weights they may come again at any time
        handover = await _handed_over(trainer, engine, version)
    return {
        "hand_over_s": time.perf_counter() - began,
        "hand_over_mb": handover.bytes / 1e6,
        "engine_pause_s": engine.pause_s,
    }


async def _handed_over(trainer: TrainerGroup, engine: TrainedEngine, version: int) -> WeightUpdate:
    """Once, or again whenever a death of the engine's that it survives was in the way."""
    route = await engine.route()
    while True:
        starts = engine.starts
        try:
            handover = await trainer.export(route, version)
            await engine.load_weights_from(handover)
        except EngineError:
            route = await engine.route()  # starts again what has died
            if engine.starts == starts:
                raise
        else:
            return handover
