"""HTTP: a Quart-Trio app on Hypercorn behind a guard. Knows the runtime and the protocol; never
MLX.

For programs that embed it: `serve_http` is the whole server, `create_app` the app alone,
`serve_app` what listens, for an app that mounts it (examples/mounted.py).
"""

from trouper.web.app import create_app
from trouper.web.server import serve_app, serve_http

__all__ = ["create_app", "serve_app", "serve_http"]
