"""Part of the interface of `verifiers.types` 0.1."""

from dataclasses import dataclass


@dataclass
class ClientConfig:
    """Address of the models."""

    api_base_url: str
    api_key_var: str
    max_retries: int
