"""Parts that do not depend on torch."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
