"""Safetensors files of a model folder: find and open them without importing torch."""

from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from retrieval.regular_files import check_regular
from rollout.base.errors import ModelError
from rollout.base.json_files import read_json


def tensor_files(folder: Path | str) -> list[Path]:
    """Return the sorted safetensors files that a folder's index names, or else all in the folder.

    Raises:
        ModelError: there is no such file, or the index is not readable.
    """
    index_path = Path(folder) / "model.safetensors.index.json"
    has_index = index_path.is_file()
    files = _indexed_files(index_path) if has_index else set(Path(folder).glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: no *.safetensors file; expected a Hugging Face model folder")
    return sorted(files)


def _indexed_files(index_path: Path) -> set[Path]:
    """Return the files that an index names; they are in its folder, and paths in it are ignored."""
    try:
        file_names = read_json(index_path)["weight_map"].values()
        return {index_path.with_name(Path(name).name) for name in file_names}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index_path} is not readable ({error}); expected the files of a model's tensors"
        ) from error


def open_tensors(file: Path, framework: Literal["pt", "np"]) -> Any:
    """Open a safetensors file for tensors of PyTorch or NumPy; only its header is read.

    Raises:
        ModelError: the file is missing, cut off, or of another format.
    """
    try:
        check_regular(file)
        return safe_open(str(file), framework)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{file}: not a readable safetensors file ({reason})") from error
