"""Stand-in for Transformer Engine on a CPU: its layers that Megatron builds, in plain torch.

Names, arguments by keyword, parameters, marks of parameters, extra states and checks of shapes are
those of Transformer Engine 2.11. `fp8_autocast` rounds the factors of products to 8 bits, with one
scale for each tensor. Nothing else of Transformer Engine is here.

A process has it if the folder above this package is in its PYTHONPATH when Megatron is imported.
"""

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = "2.11.0"
