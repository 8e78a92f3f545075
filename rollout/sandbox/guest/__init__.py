"""Code that runs inside the sandbox: standard library only, started by path, imports nothing of ours."""
