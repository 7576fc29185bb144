"""From logits to tokens, for all rows at once."""
