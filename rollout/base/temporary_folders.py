"""Temporary folders with numbers in place of random names, so that the same few paths recur."""

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def numbered_folder(prefix: str) -> Iterator[Path]:
    """Make the temporary folder `<prefix>-<N>` with the lowest free N, and remove it after the block.

    Programs write the path of their folder into prompts. Prompts with random paths would have
    no common prefix beyond the path.
    """
    for number in itertools.count():
        folder = Path(tempfile.gettempdir()) / f"{prefix}-{number}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        try:
            yield folder
        finally:
            # A process that the program left running may still write there.
            shutil.rmtree(folder, ignore_errors=True)
        return
