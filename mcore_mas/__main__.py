"""`python -m mcore_mas`."""

from mcore_mas.cli import main

if __name__ == "__main__":
    main()
