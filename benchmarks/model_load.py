"""Peak memory of loading a model on each of two tensor-parallel ranks, against the least possible.

A rank must hold its shard and one tensor while it loads. Its peak is sampled every 2 ms while it
builds the model and reads it from disk, as RssAnon and RssShmem of /proc minus their values before.
Pages of the mapped files are not counted, because they are the system's cache and can be dropped at
any time.
"""

import json
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.multiprocessing.spawn import spawn

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.process import UNMAPPED, memory_bytes
from benchmarks.support.result import print_result

TP = 2
# The shape of Qwen2.5-1.5B.
LAYERS = 28
HIDDEN = 1536
HEADS = 12
KV_HEADS = 2
FFN = 8960
VOCAB = 151936
HEAD_DIM = HIDDEN // HEADS
DISK_BYTES = 8 << 30
SAMPLING_S = 0.002
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": FFN,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
}
LAYER_SHAPES = {
    "input_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.q_proj.bias": (HIDDEN,),
    "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj.bias": (KV_HEADS * HEAD_DIM,),
    "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj.bias": (KV_HEADS * HEAD_DIM,),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "post_attention_layernorm.weight": (HIDDEN,),
    "mlp.gate_proj.weight": (FFN, HIDDEN),
    "mlp.up_proj.weight": (FFN, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, FFN),
}
EMBEDDING = "model.embed_tokens.weight"
OTHER_SHAPES = {EMBEDDING: (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
OTHER_FILE = "model-ends.safetensors"


def write_model(folder: Path) -> tuple[int, int]:
    """Write random bfloat16 weights, one file per layer; return their number and the bytes of the largest tensor."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes_by_file = {OTHER_FILE: OTHER_SHAPES}
    for layer in range(LAYERS):
        shapes_by_file[f"model-{layer:02}.safetensors"] = {
            f"model.layers.{layer}.{name}": shape for name, shape in LAYER_SHAPES.items()
        }

    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    parameters = 0
    largest = 0
    for file, shapes in shapes_by_file.items():
        tensors = {name: random_bfloat16(shape, generator) for name, shape in shapes.items()}
        save_file(tensors, str(folder / file))
        weight_map |= dict.fromkeys(tensors, file)
        parameters += sum(tensor.numel() for tensor in tensors.values())
        largest = max(largest, *(tensor.nbytes for tensor in tensors.values()))
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return parameters, largest


def random_bfloat16(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return random non-negative numbers below 1 from random bits, which is faster than randn."""
    bits_of_one = 0x3F80
    bits = torch.empty(shape, dtype=torch.int16).random_(0, bits_of_one, generator=generator)
    return bits.view(torch.bfloat16)


class PeakMemory:
    """Context manager that measures the growth of this process's unmapped memory.

    Attributes:
        bytes: largest growth since the start of the block, after its end.
    """

    def __enter__(self) -> "PeakMemory":
        self._before = memory_bytes(UNMAPPED)
        self._peak = self._before
        self.bytes = 0
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._finished.wait(SAMPLING_S):
            self._peak = max(self._peak, memory_bytes(UNMAPPED))

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        self._thread.join()
        self._peak = max(self._peak, memory_bytes(UNMAPPED))
        self.bytes = self._peak - self._before


def load(rank: int, folder: Path) -> None:
    """Load one rank's shard, check its first rows, and write the measurements to rank<n>.json."""
    from mcore_mas.megatron.model.build import build_model
    from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
    from mcore_mas.megatron.state.tensor_sources import SafeTensors
    from mcore_mas.megatron.state.weight_import import import_weights
    from rollout.models.architecture import read_architecture
    from rollout.models.layout import ParallelLayout

    store = dist.FileStore(str(folder / "store"), TP)  # type: ignore[attr-defined]
    init_process_groups(ParallelLayout(tp=TP), rank=rank, threads=1, store=store)
    architecture = read_architecture(folder)
    spec = TrainerSpec(model=str(folder), tp=TP, bf16=True)
    began = time.perf_counter()
    with PeakMemory() as peak:
        parameters = build_model(architecture, spec).numbered_parameters()
        import_weights(parameters, architecture, SafeTensors(folder), str(folder))
    seconds = time.perf_counter() - began

    embedding = parameters["embedding.word_embeddings.weight"]
    first_row = rank * len(embedding)
    with safe_open(str(folder / OTHER_FILE), "pt") as tensors:
        expected = tensors.get_slice(EMBEDDING)[first_row : first_row + 8]
    assert torch.equal(embedding[:8], expected), f"rank {rank} holds the rows of another rank"

    shard_bytes = sum(parameter.nbytes for parameter in parameters.values())
    measured = {"peak": peak.bytes, "shard": shard_bytes, "seconds": seconds}
    (folder / f"rank{rank}.json").write_text(json.dumps(measured))
    destroy_process_groups()


def main() -> int:
    """Write a model, and load it once on two ranks; the result is that of the worse rank."""
    temporary_folder = Path(tempfile.gettempdir())
    if shutil.disk_usage(temporary_folder).free < DISK_BYTES:
        print(
            f"skipped: {temporary_folder} has less than {DISK_BYTES >> 30} GiB free, which the "
            "model needs",
            file=sys.stderr,
        )
        return 1
    with tempfile.TemporaryDirectory(prefix="model_load_") as temporary:
        folder = Path(temporary)
        parameters, largest_tensor = write_model(folder)
        spawn(load, args=(folder,), nprocs=TP)
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(TP)]

    ratios = []
    for number, rank in enumerate(ranks):
        least = rank["shard"] + largest_tensor
        ratios.append(least / rank["peak"])
        print(
            f"rank {number}: {parameters / 1e9:.2f}B parameters in {rank['seconds']:.1f} s; peak "
            f"{rank['peak'] >> 20} MiB, shard {rank['shard'] >> 20} MiB, largest tensor "
            f"{largest_tensor >> 20} MiB: peak / (shard + tensor) = {rank['peak'] / least:.2f}"
        )
    print_result("model_load", min(ratios), goal=1.0, reference="shard_and_one_tensor", repeats=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
