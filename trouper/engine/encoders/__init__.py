"""Encoders: models whose tokens attend to both sides, for embeddings and scores of pairs."""
