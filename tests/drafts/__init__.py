"""The whole graph with drafts on real, tiny models."""
