"""Code inside the sandbox, which is started by path and imports the standard library only."""
