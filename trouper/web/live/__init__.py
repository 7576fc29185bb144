"""The live page at `/`, and its snapshots."""
