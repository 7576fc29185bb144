"""Formats of calls and reasoning."""
