"""Page docs/gpu.md, made from the result lines of the kit: predictions and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.shapes import CASES, TE_CASES, line_of_case
from mcore_mas.planning.memory import count_parameters
from rollout.models.published_shapes import planned_architecture
from rollout.sync.transport import PUSHED_BUCKET_BYTES

_NOT_MEASURED = "–"
LINK_GB_S = 200.0  # assumed bandwidth between GPUs
REQUEST_S = 0.06  # assumed time of SGLang to open, copy and acknowledge a bucket
MEMORY_GB_S = 0.8 * 4.8e3  # assumed: 80 % of the bandwidth of an H200's memory
_HEAD = """# On a GPU

This page has the measurements of single parts of a training; no whole training has been run on a GPU.
`python -m benchmarks.gpu --page` writes it from `benchmarks/gpu/results.jsonl`; do not edit it. A dash means: not
measured.
"""
_RUN_SO_FAR = """## What has been run

| | on CPUs | on one H100 | on several GPUs |
|---|---|---|---|
| whole training | yes, up to 7M parameters | no | no |
| update in Megatron | yes | 0.5B, 1.7B and 4B: up to 35 % MFU ([updates](#updates)) | no |
| parallel layouts | up to four ranks | – | no |
| embedded engine | yes | 0.5B | no |
| SGLang's server, with full weights or adapters | yes | no | no |
| LoRA adapters | yes | no | no |
| mixtures of experts | yes | no | no |
| weight sync over CUDA IPC | – | 4B between two processes, without SGLang: 28 GB/s | no |
| Slurm, several nodes | with simulated nodes | – | no |
"""
_MEASURE = """## Measure your GPU

- **One GPU.** `make bench-gpu` measures for nine minutes, the most important sections first. The exit status is 1 if a
  section failed or found an error, and the last line names it. To update this page, replace the lines of
  `benchmarks/gpu/results.jsonl` by those of `results/gpu/results.jsonl`. `requirements/gpu-kit.txt` lists the packages
  that the benchmarks need besides torch and Triton.
- **A training on one GPU.** `make gpu-run` trains the demo's two policies with trainers and engines on one GPU,
  evaluates them, trains in bfloat16, kills a rank, and measures, in eight minutes. The last lines name the result of
  each section, and `results/gpu-run` gets the logs. This has not been run on a GPU.
- **The same on a machine without internet.** Run `make gpu-kit` elsewhere; it packs tasks, model, Ray and missing
  packages into `.gpu`. Copy this folder with the checkout (at most 60 MiB together), and run
  `python3 -m benchmarks.gpu.whole_run --kit .gpu --out DIR --work /tmp/gpu-run`. The machine needs Python 3.12, a C
  compiler, and the packages of an image with torch, transformers and pyarrow.
- **Several GPUs.** `make gpu-acceptance` tests a machine with up to eight GPUs: NCCL, parallel layouts, restarts,
  Transformer Engine, SGLang, and a training of two policies with each weight transport. The last line says passed,
  failed, or nothing measured. This has not been run on GPUs.
"""
_PREDICTED = """\
The predictions are for an H100 and today's code. `tests/support/fake_gpu.py` runs the GPU's code without a GPU, and
estimates the time of each operation from its arithmetic, its bytes and its launch. The code that was measured had
slower kernels; a test checks that the predicted times of two of its updates are within 10 % of the measured ones. The
predictions for today's code have not been checked on a GPU.
"""
_TRANSFORMER_ENGINE = """\
Set `policies.<name>.layers: te`, and install Transformer Engine by `requirements/transformer_engine.sh`. Its linear
layers contain the norm before them, and all experts of a layer run in one grouped product. All parallel layouts,
recomputation, mixtures of experts with router replay, critics and reference models work with these layers. LoRA and
CPUs do not, and are refused before a run starts. A training can be resumed with the other layers. Selective
recomputation saves less memory, because Transformer Engine keeps the output of the norm.

`fp8: hybrid` or `fp8: e4m3`, with `bf16: true`, computes the products of layers in FP8, as Megatron's setting of this
name. `fp8_recipe` says how many numbers have a common scale: all of a factor (`tensorwise`, from Ada on), blocks of
128 (`blockwise`, from Hopper on) or blocks of 32 (`mxfp8`, from Blackwell on). Delayed scaling is not offered, because
checkpoints do not hold its scales. The bounds of [agreement](engines.md#agreement) with the engine are wider. Each
product keeps its weight in FP8 for the backward pass: two bytes a parameter more than in bfloat16, except with
`recompute: full`.

These layers were tested on a CPU, with a stand-in for Transformer Engine's modules
(`tests/exactness/test_transformer_engine.py`). No training with Transformer Engine has been run on a GPU. The table has
the MFU of the same updates; in FP8 it is relative to the peak of bfloat16.
"""
_CUDA_GRAPHS = """\
The embedded engine decodes with CUDA graphs ([engines.md](engines.md#embedded)). Megatron's CUDA graphs are not offered
for training: they need micro-batches of one shape, and prefix trees differ. They could save at most {idle:.1f} % of an
update in the first table, by prediction: the time in which no kernel runs.
"""


def page(lines: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown page. If several lines are about one case, the latest is used."""
    machine = _latest(lines, "probe", "gpu")
    if machine is not None and machine["gpu"]:
        headline = f"Measured on {machine['gpu']}, {machine['date']}."
        measured = lines
    else:
        headline = "**No GPU was at hand: nothing is measured.**"
        measured = []  # results of a CPU are not shown
    parts = [
        _HEAD,
        headline,
        "",
        _RUN_SO_FAR,
        _MEASURE,
        "## Updates",
        "",
        *_updates(lines, measured),
    ]
    parts += ["", "## With Transformer Engine", "", *_transformer_engine(measured)]
    parts += ["", "## CUDA graphs", "", *_cuda_graphs(lines)]
    parts += ["", "## Attention of one layer, forward and backward", "", *_attention(measured)]
    parts += ["", "## The head, 14,336 rows of 151,936 logits", "", *_heads(measured)]
    parts += ["", "## The embedded engine", "", *_generation(measured)]
    parts += [
        "",
        "## Weights to SGLang, by arithmetic",
        "",
        _hand_over(),
        "",
        "## Weights, measured",
        "",
        *_rates(measured),
    ]
    return "\n".join([*parts, "", "## Correctness", "", *_checks(measured), ""])


def _updates(lines: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        *_PREDICTED.splitlines(),
        "",
        "Each row is an update on one micro-batch in bfloat16. MFU is relative to 989 TFLOP/s, without recomputation;",
        "HFU also counts the operations that are computed again. *Selective* recomputes the outputs of norms and the",
        "products of SwiGLU, *full* every layer except for its last product. A case is not run if it is predicted to",
        "need more than 96 % of the GPU's free memory. 30b-a3b has two of 48 layers of Qwen3-30B-A3B, and its head.",
        "",
        "Layouts: *groups* has prompts with eight replies each, *turns* trajectories of eight turns,",
        "*branches* trees, *long* long replies to one prompt, and *whole* sequences that share nothing",
        "(`benchmarks/gpu/shapes.py`).",
        "",
        "| model | recompute | layout | tokens | MFU, predicted | GiB, predicted | MFU | HFU | GiB | tokens/s |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in CASES:
        predicted = line_of_case(lines, "meter", case) or {}
        update = line_of_case(measured, "updates", case) or {}
        counted = line_of_case(lines, "meter as measured", case) or predicted
        predicted_gib: float | str = _NOT_MEASURED
        if "bytes" in predicted:
            predicted_gib = round(predicted["bytes"]["peak"] / 2**30, 1)
        mfu: float | str = update.get("failed", update.get("skipped", _NOT_MEASURED))
        if "mfu" in update:
            mfu = round(update["mfu"], 3)
        cells = [
            case["model"],
            case.get("recompute", "none"),
            case["layout"],
            predicted.get("tokens", _NOT_MEASURED),
            predicted.get("mfu", _NOT_MEASURED),
            predicted_gib,
            mfu,
            _hardware_share(update, counted) or _NOT_MEASURED,
            update.get("gib", _NOT_MEASURED),
            update.get("tokens_per_s", _NOT_MEASURED),
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return rows


def _hardware_share(update: dict[str, Any], counted: dict[str, Any]) -> float | None:
    """Return the share of the GPU's peak of all operations of a measured update, or None without a measurement.

    Args:
        counted: operations of the code that was measured.
    """
    if "mfu" not in update or "operations" not in counted:
        return None
    operations = counted["operations"]
    return round(update["mfu"] * operations["counted"] / operations["model"], 3)


def _transformer_engine(measured: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        *_TRANSFORMER_ENGINE.splitlines(),
        "",
        "| model | recompute | layout | local | te | te, FP8 |",
        "|---|---|---|---:|---:|---:|",
    ]
    for case in TE_CASES:
        updates = [line_of_case(measured, "updates", case)]
        for fp8 in (None, "hybrid"):
            updates.append(line_of_case(measured, "transformer_engine", {**case, "fp8": fp8}))
        cells = [case["model"], case.get("recompute", "none"), case["layout"]]
        for line in updates:
            update = line or {}
            if "mfu" in update:
                cells.append(round(update["mfu"], 3))
            else:
                cells.append(update.get("failed", _NOT_MEASURED))
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return rows


def _cuda_graphs(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return why updates have no CUDA graphs, and the largest predicted share of idle time."""
    shares = [0.0]
    for case in CASES:
        predicted = line_of_case(lines, "meter", case)
        if predicted is not None and "idle_ms" in predicted:
            shares.append(predicted["idle_ms"] / predicted["seconds_per_update"] / 1e3)
    return _CUDA_GRAPHS.format(idle=100 * max(shares)).splitlines()


def _attention(measured: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        "Milliseconds with 32 query heads and 8 key-value heads of 128 in bfloat16. On an H100, the backward pass of",
        "today's Triton kernel takes 128 keys at a time; *narrow* takes 64, as the kernel did when this was measured.",
        "",
        "| layout | Triton | narrow | torch |",
        "|---|---:|---:|---:|",
    ]
    for layout in ("groups", "turns", "branches", "long", "whole"):
        line = line_of_case(measured, "attention", {"layout": layout}) or {}
        cells = [
            str(line.get(key, _NOT_MEASURED)) for key in ("triton_ms", "narrow_ms", "torch_ms")
        ]
        rows.append(f"| {layout} | {' | '.join(cells)} |")
    return rows


def _heads(measured: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        "Milliseconds of forward and backward in bfloat16, by the MiB of a chunk of logits. Updates compute logits",
        "once, and twice with GSPO and with corrections of whole replies.",
        "",
    ]
    sizes = (64, 512, 1024, 2048)
    rows += [
        f"| hidden | logits | {' | '.join(map(str, sizes))} |",
        f"|---:|---|{'---:|' * len(sizes)}",
    ]
    for hidden in (896, 2560, 5120):
        for one_pass, name in ((True, "once"), (False, "twice")):
            cells = []
            for size in sizes:
                case = {"hidden": hidden, "chunk_mib": size, "one_pass": one_pass}
                line = line_of_case(measured, "head", case) or {}
                cells.append(str(line.get("ms", _NOT_MEASURED)))
            rows.append(f"| {hidden} | {name} | {' | '.join(cells)} |")
    return rows


@dataclass(frozen=True)
class HandOver:
    """Estimate of sending bfloat16 weights from `tp` trainer ranks to a server's ranks by CUDA IPC.

    Every rank gathers the full tensors and copies them into a bucket, and the server's rank on
    the same GPU copies its part out of it. Bandwidths and the time of a request are assumed.
    """

    model: str
    tp: int

    @property
    def size(self) -> int:
        """Bytes of the full tensors, all of which each rank copies into its buckets."""
        return 2 * count_parameters(planned_architecture(self.model))

    @property
    def requests(self) -> int:
        """Number of buckets, which are sent one after the other."""
        return -(-self.size // PUSHED_BUCKET_BYTES)

    @property
    def gathered_s(self) -> float:
        """Seconds of gathering the shards of the other ranks."""
        return self.size * (self.tp - 1) / self.tp / (LINK_GB_S * 1e9)

    @property
    def copied_s(self) -> float:
        """Seconds of reading and writing the full tensors, and the server's part of them."""
        return (2 * self.size + 2 * self.size / self.tp) / (MEMORY_GB_S * 1e9)

    @property
    def seconds(self) -> float:
        """Seconds of an update: a bucket is prepared while the previous one is loaded."""
        requests_s = self.requests * REQUEST_S
        prepared_s = self.gathered_s + self.copied_s
        return max(requests_s, prepared_s) + prepared_s / self.requests


def _generation(measured: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        "Tokens per second of the model 0.5b, with prompts of 128 tokens and replies of 64. *Earlier* is the",
        "code without this attention kernel and without CUDA graphs, in float32. The goals on an H100 are 500 tokens/s",
        "with one row, and 40,000 with 256.",
        "",
        "| rows | bfloat16 | without graphs | float32 | without graphs | earlier |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    kinds = [{"bf16": bf16, "graphs": graphs} for bf16 in (True, False) for graphs in (True, False)]
    earlier = [line for line in measured if "graphs" not in line]
    for count in (1, 16, 32, 64, 256):
        cells = []
        for kind in kinds:
            line = line_of_case(measured, "engine", {"rows": count, **kind}) or {}
            cells.append(str(line.get("tokens_per_s", _NOT_MEASURED)))
        line = line_of_case(earlier, "engine", {"rows": count}) or {}
        cells.append(str(line.get("tokens_per_s", _NOT_MEASURED)))
        rows.append(f"| {count} | {' | '.join(cells)} |")
    return rows


def _rates(measured: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        "*Hand-over* sends the weights of 4b in bfloat16 from one process to another on the same GPU, as to SGLang.",
        "*Sleep* and *wake* offload and restore the memory of a trainer of 0.5b, and *checkpoint* writes it to disk.",
        "",
        "| what | GB | GB/s |",
        "|---|---:|---:|",
    ]
    for operation in ("hand-over", "sleep", "wake", "checkpoint"):
        line = line_of_case(measured, "hand_over", {"what": f"{operation}, GB/s"}) or {}
        rows.append(
            f"| {operation} | {line.get('gb', _NOT_MEASURED)} | {line.get('value', _NOT_MEASURED)} |"
        )
    return rows


def _hand_over() -> str:
    estimate = HandOver("Qwen3-32B", 8)
    return (
        f"Qwen3-32B in bfloat16 from 8 ranks to a server at tp 8: {estimate.size / 1e9:.1f} GB of full tensors in "
        f"{estimate.requests} buckets.\nThey are gathered in {estimate.gathered_s:.2f} s (at {LINK_GB_S:g} GB/s), "
        f"copied in {estimate.copied_s:.2f} s, and loaded in {estimate.requests * REQUEST_S:.1f} s if\na request takes "
        f"{1e3 * REQUEST_S:g} ms, which is an assumption. A bucket is gathered while the previous one is loaded, so\n"
        f"all of them take {estimate.seconds:.1f} s."
    )


def _checks(measured: Sequence[dict[str, Any]]) -> list[str]:
    checks_by_name: dict[str, list[dict[str, Any]]] = {}
    for line in measured:
        if "ok" in line and "what" in line:
            name = f"{line['what']}, {line['dtype']}" if "dtype" in line else line["what"]
            checks_by_name.setdefault(name, []).append(line)
    if not checks_by_name:
        return ["Kernels, updates and waits on a GPU: not measured."]
    rows = [
        "Each check compares values with bounds (`benchmarks/gpu/checks.py`). The table has the largest values of the",
        "checks of a name; *worst* is an error.",
        "",
        "| check | passed | values |",
        "|---|---|---|",
    ]
    for name, checks in checks_by_name.items():
        passed = sum(check["ok"] for check in checks)
        result = f"{passed} of {len(checks)}"
        if passed < len(checks):
            result = f"**{result}**"
        largest: dict[str, float] = {}
        for check in checks:
            for key, value in check.items():
                if isinstance(value, float):
                    largest[key] = max(value, largest.get(key, value))
        values = [f"{key} {value:.3g}" for key, value in largest.items()]
        rows.append(f"| {name} | {result} | {', '.join(values)} |")
    return rows


def _latest(lines: Sequence[dict[str, Any]], section: str, key: str) -> dict[str, Any] | None:
    """Return the latest line of a section that has a key, or None."""
    for line in reversed(lines):
        if line["section"] == section and key in line:
            return line
    return None
