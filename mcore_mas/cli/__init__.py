"""The command line, `mcore-mas`."""
