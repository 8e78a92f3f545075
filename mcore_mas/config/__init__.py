"""The configuration of a run: composed by Hydra, checked by pydantic, read from one file by all later stages."""
