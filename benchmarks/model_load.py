"""Memory that loading a model takes on each of two tensor-parallel ranks, against the least that it could take.

A rank has to hold its shard, and one tensor on the way there. Its extra memory is counted while it builds the model
and reads it from disk: the peak of the pages it has of its own (RssAnon and RssShmem of /proc, every 2 ms) less what it
had before. Pages of the files themselves are the system's cache, clean and dropped when needed, and are not counted.
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

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

TP, LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = (
    2,
    28,
    1536,
    12,
    2,
    8960,
    151936,
)  # as Qwen2.5-1.5B
HEAD_DIM = HIDDEN // HEADS
DISK_BYTES = 8 << 30
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
LAYER = {
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
ENDS = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}


def write_model(folder: Path) -> tuple[int, int]:
    """Write random bfloat16 weights, a file for each layer; returns their number and the largest tensor's bytes."""
    generator = torch.Generator().manual_seed(0)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    files = {"ends": ENDS}
    files |= {
        f"{i:02}": {f"model.layers.{i}.{name}": shape for name, shape in LAYER.items()}
        for i in range(LAYERS)
    }
    index, parameters, largest = {}, 0, 0
    for file, shapes in files.items():
        # any bits below those of 1.0 are a number
        tensors = {
            name: torch.empty(shape, dtype=torch.int16)
            .random_(0, 0x3F80, generator=generator)
            .view(torch.bfloat16)
            for name, shape in shapes.items()
        }
        save_file(tensors, str(folder / f"model-{file}.safetensors"))
        index |= dict.fromkeys(tensors, f"model-{file}.safetensors")
        parameters += sum(tensor.numel() for tensor in tensors.values())
        largest = max(largest, *(tensor.nbytes for tensor in tensors.values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return parameters, largest


def own_bytes() -> int:
    """Memory of this process that is no page of a file."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) << 10


class Peak:
    """The largest `own_bytes` within the block, over what it was on entry."""

    def __enter__(self) -> "Peak":
        self._before = self.bytes = own_bytes()
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, own_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()
        self.bytes = max(self.bytes, own_bytes()) - self._before


def load(rank: int, folder: Path) -> None:
    """Load one rank's shard; writes what that took to rank<n>.json."""
    from mcore_mas.megatron.model.build import build_model
    from mcore_mas.megatron.spec import TrainerSpec, destroy_process_groups, init_process_groups
    from mcore_mas.megatron.state.weight_import import SafeTensors, import_weights
    from rollout.models.architecture import read_architecture
    from rollout.models.layout import ParallelLayout

    store = dist.FileStore(str(folder / "store"), TP)  # type: ignore[attr-defined]
    init_process_groups(ParallelLayout(tp=TP), rank=rank, threads=1, store=store)
    architecture = read_architecture(folder)
    started = time.perf_counter()
    with Peak() as peak:
        parameters = build_model(
            architecture, TrainerSpec(model=str(folder), tp=TP, bf16=True)
        ).numbered_parameters()
        import_weights(parameters, architecture, SafeTensors(folder))
    seconds = time.perf_counter() - started
    shard = sum(parameter.nbytes for parameter in parameters.values())
    ours = parameters["embedding.word_embeddings.weight"]
    with safe_open(str(folder / "model-ends.safetensors"), "pt") as tensors:
        rows = tensors.get_slice("model.embed_tokens.weight")[
            rank * len(ours) : rank * len(ours) + 8
        ]
    assert torch.equal(ours[:8], rows), f"rank {rank} holds other rows than its own"
    measured = {"peak": peak.bytes, "shard": shard, "seconds": seconds}
    (folder / f"rank{rank}.json").write_text(json.dumps(measured))
    destroy_process_groups()


def main() -> int:
    """Writes a model, loads it once on two ranks, removes it; the ratio is the least possible over ours, the worst."""
    place = Path(tempfile.gettempdir())
    if shutil.disk_usage(place).free < DISK_BYTES:
        print(
            f"skipped: {place} has less than {DISK_BYTES >> 30} GiB free, which the model needs",
            file=sys.stderr,
        )
        return 1
    with tempfile.TemporaryDirectory(prefix="model_load_") as temporary:
        folder = Path(temporary)
        parameters, tensor = write_model(folder)
        spawn(load, args=(folder,), nprocs=TP)
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(TP)]
    for number, rank in enumerate(ranks):
        print(
            f"rank {number}: {parameters / 1e9:.2f}B parameters in {rank['seconds']:.1f} s; peak "
            f"{rank['peak'] >> 20} MiB, shard {rank['shard'] >> 20} MiB, largest tensor {tensor >> 20} MiB: "
            f"peak / (shard + tensor) = {rank['peak'] / (rank['shard'] + tensor):.2f}"
        )
    ratio = min((rank["shard"] + tensor) / rank["peak"] for rank in ranks)
    print(f"name=model_load ratio={ratio:.2f} goal=1.00 reference=shard_and_one_tensor n=1")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
