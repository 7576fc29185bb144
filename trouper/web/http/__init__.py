"""Connections, origins, bodies and their schema, for every dialect."""
