"""Anthropic's dialect: one file for each thing that travels."""
