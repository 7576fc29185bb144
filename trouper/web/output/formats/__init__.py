"""Formats of calls by family of models."""
