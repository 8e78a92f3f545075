"""What all other folders build on: registry, errors, seeds, files, processes, task groups."""
