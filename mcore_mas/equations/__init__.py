"""Equations of credit assignment and losses: tensors in, tensors out, with the bounds of their options."""
