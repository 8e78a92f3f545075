"""`python -m mcore_mas`."""

from __future__ import annotations

import sys

from mcore_mas.training.joblog import Stopped, stop_at_start

if __name__ == "__main__":
    try:
        if "train" in sys.argv:
            stop_at_start()  # before what takes long to import
        from mcore_mas.cli.main import main

        main()
    except Stopped as stop:
        print(stop, file=sys.stderr)
        sys.exit(143)
