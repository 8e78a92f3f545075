"""Kinds of GPUs, and clusters made of them.

The option `--gpus 8xH100` of `mcore-mas plan` and the setting `cluster.gpus` are read as a `Cluster`.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import yaml
from pydantic import Field, ValidationError

from rollout.base.section import Section
from rollout.base.yaml_files import read_yaml


class PlanError(ValueError):
    """A run does not fit a cluster, or a cluster cannot be read; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """A kind of GPU, from the data sheet of its maker."""

    memory: float  # GB (1e9 bytes)
    flops: float  # TFLOP/s, dense bfloat16

    @property
    def memory_bytes(self) -> float:
        """Memory in bytes."""
        return self.memory * 1e9


GPUS = {
    "H100": GPU(memory=80, flops=989),
    "H200": GPU(memory=141, flops=989),
    "A100": GPU(memory=80, flops=312),
    "A100-40GB": GPU(memory=40, flops=312),
    "B200": GPU(memory=180, flops=2250),
    "L40S": GPU(memory=48, flops=362),
    "L4": GPU(memory=24, flops=121),
    "A10": GPU(memory=24, flops=125),
    "RTX4090": GPU(memory=24, flops=165),
}
# TFLOP/s of cards that CUDA reports under the name of a kind with a further word, such as
# "NVIDIA H100 PCIe", and that are slower than the kind because of a lower power limit.
_CARDS = {("H100", "PCIe"): 756, ("H100", "NVL"): 835, ("H200", "NVL"): 835}

# Further words in the names of GPUs that are slower than their kind, whose peak is not in a table: a
# part of a GPU (Multi-Instance GPU), the RTX 4090 of laptops, and the RTX 4090 D.
_UNKNOWN_VARIANTS = {"MIG", "Laptop", "D"}


def peak_flops(name: str) -> float | None:
    """Return the peak of a GPU in dense bfloat16, in FLOP/s, or None if it is not known.

    It is known for the kinds in `GPUS`, and for the PCIe and NVL cards of the H100 and the H200.

    Args:
        name: the name that CUDA reports, such as "NVIDIA H100 80GB HBM3".
    """
    words = set(re.split("[ -]", name.replace("RTX ", "RTX")))
    if words & _UNKNOWN_VARIANTS:
        return None
    for (kind, word), flops in _CARDS.items():
        if kind in words and word in words:
            return 1e12 * flops
    for kind, gpu in GPUS.items():
        if kind in words:
            return 1e12 * gpu.flops
    return None


class ClusterFile(Section):
    """The content of a YAML file that describes a cluster."""

    gpus: str  # number and kind, such as 16xH100
    node: int = Field(8, ge=1)  # number of GPUs of a machine
    memory: float | None = Field(None, gt=0)  # GB of a GPU, if it differs from that of its kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """GPUs of one kind, in machines of equal size."""

    gpus: int
    kind: str
    gpu: GPU
    gpus_per_node: int = 8

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a number and a kind of GPUs, such as 8xH100.

        Raises:
            PlanError: the text is not a number of GPUs of a known kind.
        """
        match = re.fullmatch(r"(\d+)x(.+)", text)
        if match is None or int(match[1]) == 0 or match[2] not in GPUS:
            raise PlanError(
                f"GPUs '{text}': expected a number and a kind, for example 8xH100; kinds: "
                f"{', '.join(GPUS)}"
            )
        return cls(gpus=int(match[1]), kind=match[2], gpu=GPUS[match[2]])

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a `ClusterFile`.

        Raises:
            PlanError: the file cannot be read, or is not a valid `ClusterFile`.
        """
        try:
            file = ClusterFile.model_validate(read_yaml(path))
        except (OSError, yaml.YAMLError) as error:
            raise PlanError(f"{path}: {' '.join(str(error).split())}") from error
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise PlanError(
                f"{path}: {key}: {first['msg']}; expected gpus (such as 16xH100), and optionally node "
                "(GPUs of a machine; default 8) and memory (GB of a GPU; default: that of its kind)"
            ) from None

        cluster = replace(cls.parse(file.gpus), gpus_per_node=file.node)
        if file.memory is None:
            return cluster
        return replace(cluster, gpu=replace(cluster.gpu, memory=file.memory))

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.gpus}x{self.kind}"
