"""Figures of the source tree: `just house` prints them beside the targets."""
