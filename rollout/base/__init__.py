"""What all other folders build on: choices by name with typed options, errors, files, HTTP, processes, task groups."""
