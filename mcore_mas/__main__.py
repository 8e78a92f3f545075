"""`python -m mcore_mas`."""

from __future__ import annotations

from mcore_mas.cli.main import main

if __name__ == "__main__":
    main()
