"""Clients' own configurations."""
