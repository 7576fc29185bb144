"""Slots, lengths and shapes of one forward pass."""
