"""Entry point of `mcore-mas` and `python -m mcore_mas`."""

import sys

from mcore_mas.runtime.stop_signal import Stopped, ignore_stop_signals, raise_on_stop_signals
from rollout.base.terminal import say

_STOPPABLE = {"train", "evaluate"}  # commands that save their state when they are stopped


def main() -> None:
    """Run a command; those in `_STOPPABLE` handle stop signals already during the slow imports."""
    try:
        if not _STOPPABLE.isdisjoint(sys.argv):
            raise_on_stop_signals()
        from mcore_mas.cli.main import main as run

        run()
    except Stopped as stop:
        ignore_stop_signals()
        say(str(stop))
        sys.exit(143)


if __name__ == "__main__":
    main()
