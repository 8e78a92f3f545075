"""Sequence packing: samples as a prefix tree, dealt to micro-batches by bin packing."""
