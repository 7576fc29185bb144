"""Benchmarks: one command each. `python -m benchmarks` is the whole table."""
