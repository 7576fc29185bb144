"""The live page in a real browser."""
