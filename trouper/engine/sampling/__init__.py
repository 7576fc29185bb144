"""Sampling: from logits to tokens, for all rows at once."""
