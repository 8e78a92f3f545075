"""An empty sqlite store of MLflow, which takes seconds to make, made once per test session."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path


def write_database(path: Path) -> str:
    """Write an empty store to a file; return its tracking URI."""
    path.write_bytes(_empty_database())
    return f"sqlite:///{path}"


@functools.cache
def _empty_database() -> bytes:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore  # takes a second

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mlflow.db")
        SqlAlchemyStore(f"sqlite:///{path}", folder).engine.dispose()
        return path.read_bytes()
