"""Kinds of GPUs and clusters are parsed from names and files."""

from pathlib import Path

import pytest

from mcore_mas.planning.gpus import GPUS, Cluster, PlanError, peak_flops


def test_a_cluster_is_parsed_and_printed() -> None:
    cluster = Cluster.parse("16xH200")
    assert (cluster.gpus, cluster.kind, cluster.gpu) == (16, "H200", GPUS["H200"])
    assert str(cluster) == "16xH200"


@pytest.mark.parametrize("text", ["8", "0xH100", "8xH1000", "x"])
def test_unknown_gpus_are_refused(text: str) -> None:
    expected = "expected a number and a kind, for example 8xH100; kinds: H100, H200, A100"
    with pytest.raises(PlanError, match=expected):
        Cluster.parse(text)


def test_a_cluster_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("{gpus: 8xH100, node: 4, memory: 94}")
    cluster = Cluster.read(file)
    assert (cluster.gpus, cluster.gpus_per_node) == (8, 4)
    assert (cluster.gpu.memory, cluster.gpu.flops) == (94, 989)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{gpus: 8xH100, memroy: 94}", "cluster.yaml: memroy: .*; expected gpus"),
        ("{node: 8}", "cluster.yaml: gpus: Field required"),
        ("{gpus: 8xH100, memory: much}", "cluster.yaml: memory: "),
        ("{gpus: 8xH100, node: 0}", "cluster.yaml: node: "),
        ("{gpus: 8xH100, 7: 7}", "cluster.yaml: 7: "),
        ("{gpus: '6'}", "GPUs '6': expected a number and a kind"),
        ("{gpus: [}", "cluster.yaml: "),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(PlanError, match=message):
        Cluster.read(file)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200 NVL", 835),
    ],
)
def test_peak_flops_of_known_gpus(name: str, tflops: float) -> None:
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA GH200 480GB",
        "Tesla T4",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX 4000 Ada Generation",
    ],
)
def test_peak_flops_of_other_gpus_are_not_known(name: str) -> None:
    assert peak_flops(name) is None
