"""An opponent of a run whose engine is SGLang: it plays with earlier weights of the trained policy."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.training.opponents import Opponents
from rollout.records.trajectory import Sampling

if TYPE_CHECKING:
    from rollout.engines.sglang.engine import SGLangEngine


def test_an_opponent_on_a_server_plays_with_earlier_weights(
    make: Callable[..., SGLangEngine], folder: Path, tmp_path: Path
) -> None:
    values = resolve(
        [
            "experiment=demo_poker",
            "engine=sglang",
            f"results={tmp_path}",
            f"policies.shared.model={folder}",
            f"+policies.rival={{model: {folder}}}",
            "opponents={rival: {share: 1, past: {of: shared, every: 2, choose: newest}}}",
        ]
    )
    config = RunConfig.from_values(values, "config")
    member_folder = config.folder / "train" / "opponents" / "rival" / "2"
    shutil.copytree(folder, member_folder)
    engine = make()
    opponents = Opponents(config, {"rival": engine})

    async def versions() -> list[int]:
        played = []
        for step in (0, 1, 2, 3):
            await opponents.prepare(step)
            completion = await engine.generate((1, 2), Sampling(max_tokens=2))
            played.append(completion.versions[0].version)
        return played

    assert asyncio.run(versions()) == [0, 0, 2, 2]
