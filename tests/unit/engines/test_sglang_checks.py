"""A server's weights are compared as far as its own reading of the folder could be repeated."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout.base.errors import EngineError
from rollout.engines.sglang.fleet import Checks
from rollout.engines.sglang.settings import SGLangSettings
from rollout.models.tensors import read_tensors
from rollout.sync import WeightUpdate
from rollout.sync.digests import SGLangDigest
from rollout.sync.sglang_layout import kind_of
from tests.support import reference

QKV = "model.layers.{}.self_attn.qkv_proj.weight of rank {}"


class Server:
    """Two ranks of a server that orders one kind of tensor in its own way, and has a buffer of its own."""

    def __init__(
        self, folder: Path, held: dict[str, Any], paths: tuple[str, ...] = ("/weights_checker",)
    ) -> None:
        digest = SGLangDigest(**held)
        for name, tensor in read_tensors(folder):
            digest.add(name, tensor)
        self.sums, self.paths, self.asked = digest.finish(), paths, 0
        self.client = self

    async def has(self, path: str) -> bool:
        return path in self.paths

    async def call(self, path: str, body: dict[str, str]) -> Any:
        assert (path, body) == ("/weights_checker", {"action": "checksum"})
        self.asked += 1
        ranks = []
        for rank in (0, 1):
            end = f" of rank {rank}"
            sums = {
                name.removesuffix(end): value
                for name, value in self.sums.items()
                if name.endswith(end)
            }
            sums |= {name: "its own" for name in sums if ".down_proj." in name}
            ranks.append({"checksums": {**sums, "model.layers.0.self_attn.scale": "0"}})
        return {"ranks": ranks}


def handed_over(sums: dict[str, str]) -> WeightUpdate:
    return WeightUpdate(version=4, transport="disk", place="", checksums=sums, bytes=1)


@pytest.fixture
def settings(tmp_path: Path) -> SGLangSettings:
    reference.make_model("qwen2", tmp_path)
    return SGLangSettings(folder=tmp_path, max_length=8, tp=2)


def test_what_a_server_orders_itself_is_told_once_and_left_out(settings: SGLangSettings) -> None:
    server: Any = Server(settings.folder, settings.held)
    told: list[str] = []
    checks = Checks(settings, told.append)
    right = dict(server.sums)

    async def play() -> None:
        assert checks.direct == []  # nothing is known yet
        await checks.learn(server)
        await checks.learn(server)
        assert server.asked == 1
        assert (
            "model.layers.*.self_attn.o_proj.weight" in checks.direct
            and "model.norm.weight" in checks.direct
        )
        assert not any("down_proj" in kind or "of rank" in kind for kind in checks.direct)
        drafts = Checks(replace(settings, options={"speculative-algorithm": "EAGLE"}), told.append)
        drafts._kinds = checks._kinds
        assert drafts.direct == []  # a draft model would be given the shards, too
        assert told == [
            "SGLang: model.layers.*.mlp.down_proj.weight of rank 0 and 3 more kinds are in a form of its own and not "
            "compared"
        ]
        await checks.check(server, handed_over(right))
        for name in (
            right
        ):  # of a layer that was not looked at in the beginning, and on the second rank, too
            wrong = checks.check(server, handed_over(right | {name: "0"}))
            if kind_of(name).startswith("model.layers.*.mlp.down_proj"):
                await wrong
            else:
                with pytest.raises(
                    EngineError, match=f"tensor '{name}': the engine's bytes differ .* version 4"
                ):
                    await wrong

    asyncio.run(play())
    assert {QKV.format(layer, rank) for layer in (0, 1) for rank in (0, 1)} < right.keys()


def test_a_server_without_checksums_is_told_and_not_asked(settings: SGLangSettings) -> None:
    server: Any = Server(settings.folder, settings.held, paths=())
    told: list[str] = []
    checks = Checks(settings, told.append)
    asyncio.run(checks.learn(server))
    asyncio.run(checks.check(server, handed_over({"a": "1"})))
    assert server.asked == 0
    assert told == [
        "SGLang: the server has no /weights_checker; its weights are not compared with the trainer's"
    ]


def test_how_servers_hold_weights(settings: SGLangSettings) -> None:
    folder = settings.folder
    held = SGLangSettings(
        folder=folder, max_length=8, options={"device": "cpu", "dtype": "float"}
    ).held
    assert held == {"dtype": "float32", "tp": 1, "kv_heads": 2, "gpu": False, "vocab": 101}
    held |= {"dtype": "float16", "tp": 2, "gpu": True}
    assert settings.held == held  # auto is never float32
    assert (
        SGLangSettings(folder=folder, max_length=8, options={"dtype": "bfloat16"}).held["dtype"]
        == "bfloat16"
    )
    for options in ({"verify": False}, {"options": {"quantization": "fp8"}}):
        assert not SGLangSettings(folder=folder, max_length=8, **options).held  # type: ignore[arg-type]


def test_a_context_may_be_filled_to_the_models_last_position(settings: SGLangSettings) -> None:
    longest = json.loads((settings.folder / "config.json").read_text())["max_position_embeddings"]
    name = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"  # or two more than that would not be taken
    assert SGLangSettings(folder=settings.folder, max_length=longest).variables == {
        "OMP_NUM_THREADS": "1",
        name: "1",
    }
    assert SGLangSettings(folder=settings.folder, max_length=longest + 1).variables == {
        "OMP_NUM_THREADS": "1"
    }
