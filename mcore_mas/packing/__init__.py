"""Sequence packing: samples as prefix trees, put into micro-batches by bin packing."""
