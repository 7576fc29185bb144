"""Structured output by llguidance."""
