"""Training with Transformer Engine's layers, on a CPU with a stand-in for its kernels.

    PYTHONPATH=tests/support/stand_in_transformer_engine python -m tests.exactness.transformer_engine FOLDER

Megatron looks for Transformer Engine when it is imported, so this is a program, which tests run as a
process. Everything but Transformer Engine's own modules is the real code: Megatron's specs and its
classes on top of these modules, names and shards of weights, exports, checkpoints, and schedules.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron.core.extensions import transformer_engine as megatron_extension

from mcore_mas.megatron.spec import TrainerSpec
from mcore_mas.megatron.step.trainer import MegatronTrainer
from tests.exactness.agreement import LAYER_COUNTS, compare_engines, train_model
from tests.exactness.rows import Row
from tests.exactness.training import TESTED_STEPS, train_rows
from tests.support import ranks, reference

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests" / "support" / "stand_in_transformer_engine"

_MIXTURE = "qwen3_moe"
ROWS = (
    Row(name="one rank", max_tokens=1000),
    # Transformer Engine's attention computes micro-batches whose sequences share nothing.
    Row(name="sequences, Qwen3", family="qwen3", feed="linear"),
    Row(name="TP2", layout={"tp": 2}),
    Row(name="TP2 + SP, Llama 3", family="llama", layout={"tp": 2, "sp": True}),
    Row(name="PP2, selective", family="qwen3", layout={"pp": 2, "recompute": "selective"}),
    Row(name="PP2 × 2 stages", layout={"pp": 2, "vpp": 2}),
    Row(name="CP2, recompute", layout={"cp": 2, "recompute": "full"}, max_tokens=1000),
    Row(name="CP2, sequences", layout={"cp": 2}, feed="linear"),
    Row(
        name="DP2 + distributed optimizer, overlap",
        layout={"dp": 2, "distributed_optimizer": True, "overlap": True, "bucket": 10_000},
    ),
    Row(name="critic, TP2", critic=True, layout={"tp": 2}),
    Row(name="Qwen3-MoE, selective", family=_MIXTURE, layout={"recompute": "selective"}),
    Row(name="Qwen3-MoE, TP2 + SP", family=_MIXTURE, layout={"tp": 2, "sp": True}),
    Row(
        name="Qwen3-MoE, DP2 × EP2 + distributed optimizer",
        family=_MIXTURE,
        layout={"dp": 2, "ep": 2, "distributed_optimizer": True},
    ),
)

# Trainings that are stopped after their first step and resumed with other layers in another layout.
RESUMED = {
    "local to te": ("qwen3", {"layers": "local"}, {"layers": "te", "tp": 2, "sp": True}),
    "te to local": ("qwen3", {"layers": "te", "tp": 2}, {"layers": "local", "pp": 2}),
    "local experts to te": (_MIXTURE, {"layers": "local"}, {"layers": "te", "dp": 2, "ep": 2}),
    "te experts to local": (_MIXTURE, {"layers": "te", "dp": 2, "ep": 2}, {"layers": "local"}),
}
RESUMED_STEPS = 2

# Layouts of a mixture whose experts are those that an engine has recorded.
REPLAYED = {
    "local": {"layers": "local"},
    "te": {"layers": "te"},
    "te, DP2 × EP2": {"layers": "te", "dp": 2, "ep": 2},
}

# Trainings with products in FP8, whose factors the stand-in rounds, beside one in bfloat16.
_FP8 = {"layers": "te", "bf16": True, "fp8": "hybrid"}
IN_FP8 = {
    "bfloat16": ("qwen3", {"layers": "te", "bf16": True}),
    "none": ("qwen3", _FP8),
    "selective": ("qwen3", {**_FP8, "recompute": "selective"}),
    "full": ("qwen3", {**_FP8, "recompute": "full"}),
    "blocks of 32": ("qwen3", {**_FP8, "fp8_recipe": "mxfp8"}),
    "TP2 + SP": ("qwen3", {**_FP8, "tp": 2, "sp": True}),
    "CP2": ("qwen3", {**_FP8, "cp": 2}),
    "experts, bfloat16": (_MIXTURE, {"layers": "te", "bf16": True}),
    "experts": (_MIXTURE, _FP8),
}


# Trainers whose memory is compared with the plan.
MEASURED = {
    "selective": ("qwen2", {"layers": "te", "recompute": "selective"}),
    "norms of queries and keys": ("qwen3", {"layers": "te"}),
    "mixture": (_MIXTURE, {"layers": "te"}),
    "mixture, selective": (_MIXTURE, {"layers": "te", "recompute": "selective"}),
}


def run_with_stand_in(*arguments: str) -> None:
    """Run this program in a process that finds the stand-in."""
    path = os.pathsep.join([str(STAND_IN), str(ROOT)])
    command = [sys.executable, "-W", "ignore", "-m", "tests.exactness.transformer_engine"]
    subprocess.run([*command, *arguments], check=True, env={**os.environ, "PYTHONPATH": path})


def rows_with_transformer_engine() -> list[Row]:
    """Return the rows, each with `layers: te` in its layout."""
    return [Row(**{**vars(row), "layout": {**row.layout, "layers": "te"}}) for row in ROWS]


def main(folder: Path) -> None:
    """Train all rows, and the resumed and the replayed trainings; write their results to `folder`."""
    assert megatron_extension.HAVE_TE, "set PYTHONPATH as in the first lines of this file"
    first_jobs, resumed_jobs = _resumed_jobs(folder)
    other_jobs = [
        *first_jobs,
        *_replayed_jobs(folder),
        *_fp8_jobs(folder),
        *_memory_jobs(folder),
        *_folder_jobs(folder),
        *_agreement_jobs(folder),
    ]
    # A server of forks would import everything again, because only this program has the stand-in.
    train_rows(rows_with_transformer_engine(), folder, other_jobs, TESTED_STEPS, "fork")
    ranks.run_jobs(resumed_jobs, "fork")


def _job(function: Any, layout: dict[str, Any], model: Path, **arguments: Any) -> ranks.Job:
    sizes = {name: layout[name] for name in ("tp", "pp", "cp", "dp", "ep") if name in layout}
    spec = ranks.make_spec(str(model), **layout)
    return ranks.Job(function=function, arguments={"spec": spec, **arguments}, **sizes)


def _resumed_jobs(folder: Path) -> tuple[list[ranks.Job], list[ranks.Job]]:
    """Return the jobs that write checkpoints, and those that continue from them."""
    samples = reference.make_samples()
    first_jobs = []
    resumed_jobs = []
    for name, (family, first, second) in RESUMED.items():
        model = folder / f"resumed_{family}"
        if not model.exists():
            reference.make_model(family, model)
        out = folder / name
        first_jobs.append(
            _job(
                ranks.train,
                first,
                model,
                out=out,
                samples=samples,
                steps=RESUMED_STEPS,
                max_tokens=64,
            )
        )
        resumed_jobs.append(
            _job(
                ranks.resume,
                second,
                model,
                out=folder / f"{name}, resumed",
                checkpoint=out / "checkpoint",
                samples=samples,
                steps=RESUMED_STEPS - 1,
            )
        )
    return first_jobs, resumed_jobs


def _replayed_jobs(folder: Path) -> list[ranks.Job]:
    model = folder / "replayed"
    reference.make_model(_MIXTURE, model, layers=4, num_experts=300, moe_intermediate_size=4)
    samples = reference.with_random_routing(reference.make_samples(), experts=300, layers=3)
    return [
        _job(
            ranks.train,
            layout,
            model,
            out=folder / f"replayed {name}",
            samples=samples,
            steps=1,
            max_tokens=12,
        )
        for name, layout in REPLAYED.items()
    ]


def _fp8_jobs(folder: Path) -> list[ranks.Job]:
    for family in {family for family, _ in IN_FP8.values()}:
        reference.make_model(family, folder / f"fp8_{family}")
    return [
        _job(
            ranks.train,
            layout,
            folder / f"fp8_{family}",
            out=folder / f"fp8 {name}",
            samples=reference.make_samples(),
            steps=2,
            max_tokens=64,
        )
        for name, (family, layout) in IN_FP8.items()
    ]


def _memory_jobs(folder: Path) -> list[ranks.Job]:
    jobs = []
    for name, (family, layout) in MEASURED.items():
        model = folder / f"measured_{family}"
        if not model.exists():
            reference.make_model(
                family,
                model,
                layers=2,
                vocab_size=256,
                hidden_size=128,
                intermediate_size=384,
            )
        out = folder / f"memory {name}"
        out.mkdir()
        samples = reference.make_samples()
        jobs.append(_job(ranks.measure_trainer_memory, layout, model, out=out, samples=samples))
    return jobs


def _folder_jobs(folder: Path) -> list[ranks.Job]:
    model = folder / "written"
    reference.make_model(_MIXTURE, model)
    layout = {"layers": "te", "tp": 2, "sp": True}
    return [_job(_write_folder, layout, model, out=folder / "hugging_face")]


def _agreement_jobs(folder: Path) -> list[ranks.Job]:
    arguments = {"folder": folder / "agreement", "out": folder / "agreement.json"}
    return [ranks.Job(function=_write_agreement, arguments=arguments)]


def _write_agreement(rank: int, folder: Path, out: Path) -> None:
    """Write the metrics of trainers in bfloat16 and in FP8, beside engines of bfloat16 with right and stale weights."""
    trained = train_model(LAYER_COUNTS[0])
    names = list(trained.stale_weights)[:2]
    engines = {name: trained.stale_weights[name] for name in names}
    metrics = {
        name: list(compare_engines(trained, engines, folder, layers="te", **settings).values())
        for name, settings in {"bfloat16": {}, "float8": {"fp8": "hybrid"}}.items()
    }
    out.write_text(json.dumps(metrics))


def _write_folder(rank: int, spec: TrainerSpec, out: Path) -> None:
    """Write the untrained model as a Hugging Face folder; check the names of Transformer Engine's weights."""
    trainer = MegatronTrainer(spec)
    trainer.model.write(out)
    names = set(trainer.model.all_parameters)
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in names
    assert "decoder.layers.0.mlp.experts.linear_fc2.weight3" in names
    assert not any("_extra_state" in name for name in names)
    assert any(key.endswith("_extra_state") for key in trainer._stages[0].state_dict())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
