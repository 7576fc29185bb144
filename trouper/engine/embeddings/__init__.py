"""Embeddings: hidden states of a prompt, pooled and projected."""
