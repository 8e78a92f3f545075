"""YAML files of plain values, in which a key is given once and aliases are bounded."""

from pathlib import Path
from typing import Any

import yaml

# libyaml's parser is ten times as fast; PyYAML may have been built without it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_VALUES = 1_000_000


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        OSError: the file cannot be read.
        yaml.YAMLError: it is not YAML or not UTF-8, gives a key twice, or its aliases stand for too
            many values.
    """
    with path.open(encoding="utf-8") as stream:  # PyYAML names the stream in its errors
        loader = _LOADER(stream)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _check_nodes(root)
            return loader.construct_document(root)
        except UnicodeDecodeError as error:
            raise yaml.YAMLError(f"{path} is not in UTF-8: {error}; save it as UTF-8") from None
        finally:
            loader.dispose()


def _check_nodes(root: yaml.Node) -> None:
    """Refuse a key that is given twice, of which PyYAML would take the last, and alias bombs."""
    unvisited = [root]
    visited = 0
    while unvisited:
        node = unvisited.pop()
        visited += 1  # an aliased node counts as often as it is referred to
        if visited > _MAX_VALUES:
            raise yaml.YAMLError(f"more than {_MAX_VALUES} values with its aliases written out")
        if isinstance(node, yaml.SequenceNode):
            unvisited.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            keys: set[tuple[str, str]] = set()
            for key, value in node.value:
                if (key.tag, str(key.value)) in keys:
                    raise yaml.YAMLError(f"key '{key.value}' is there twice{key.start_mark}")
                keys.add((key.tag, str(key.value)))
                unvisited.append(value)
