"""YAML files of plain values, in which a key is given once and aliases are bounded."""

from pathlib import Path
from typing import Any

import yaml

from retrieval.regular_files import MAX_REGULAR_BYTES, check_regular

# libyaml's parser is ten times as fast; PyYAML may have been built without it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_VALUES = 1_000_000
_MAX_DEPTH = 100  # limit of nested values; code that walks a config is recursive


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device.
        yaml.YAMLError: it is not YAML or not UTF-8, is too large, gives a key twice, is nested too
            deeply, has a value that cannot be converted, such as the date 2024-13-01, or its aliases
            stand for too many values.
    """
    if check_regular(path) > MAX_REGULAR_BYTES:
        raise yaml.YAMLError(f"{path} has more than {MAX_REGULAR_BYTES} bytes")
    with path.open(encoding="utf-8") as stream:  # PyYAML names the stream in its errors
        loader = _LOADER(stream)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _check_nodes(root)
            return loader.construct_document(root)
        except RecursionError:
            raise yaml.YAMLError(f"values nested deeper than {_MAX_DEPTH}") from None
        except UnicodeDecodeError as error:
            raise yaml.YAMLError(f"{path} is not in UTF-8: {error}; save it as UTF-8") from None
        except ValueError as error:  # of a date, a time or a number
            raise yaml.YAMLError(f"{path} has a value that cannot be converted: {error}") from None
        finally:
            loader.dispose()


def _check_nodes(root: yaml.Node) -> None:
    """Refuse deep nesting, alias bombs, and duplicate keys, of which PyYAML would take the last."""
    unvisited = [(root, 1)]  # nodes and their depths
    visited = 0
    while unvisited:
        node, depth = unvisited.pop()
        if depth > _MAX_DEPTH:
            raise yaml.YAMLError(f"values nested deeper than {_MAX_DEPTH}")
        visited += 1  # an aliased node counts as often as it is referred to
        if visited > _MAX_VALUES:
            raise yaml.YAMLError(f"more than {_MAX_VALUES} values with its aliases written out")
        if isinstance(node, yaml.SequenceNode):
            unvisited.extend((item, depth + 1) for item in node.value)
        elif isinstance(node, yaml.MappingNode):
            keys: set[tuple[str, str]] = set()
            for key, value in node.value:
                if (key.tag, str(key.value)) in keys:
                    raise yaml.YAMLError(f"key '{key.value}' is there twice{key.start_mark}")
                keys.add((key.tag, str(key.value)))
                unvisited.append((value, depth + 1))
