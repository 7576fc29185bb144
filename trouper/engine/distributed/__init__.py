"""One rank's part of a model, and the collectives of all."""
