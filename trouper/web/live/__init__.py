"""The live page at `/`, and the snapshots that it is fed with."""
