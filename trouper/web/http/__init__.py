"""Connections, origins, keys, bodies and their schema: what every dialect shares of HTTP."""
