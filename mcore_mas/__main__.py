"""Entry point of `mcore-mas` and `python -m mcore_mas`."""

import sys

from mcore_mas.runtime.stop_signal import Stopped, stop_at_start
from rollout.base.processes import say


def main() -> None:
    """Run a command. The stop signals of a training are handled before the slow imports."""
    try:
        if "train" in sys.argv:
            stop_at_start()
        from mcore_mas.cli.main import main as run

        run()
    except Stopped as stop:
        say(str(stop))
        sys.exit(143)


if __name__ == "__main__":
    main()
