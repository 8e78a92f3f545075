"""Sources of tasks: generators with demonstrations, published data files, leaks between splits."""
