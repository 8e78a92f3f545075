"""Command line `mcore-mas`: a module per group of commands."""
