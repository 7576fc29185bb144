"""The HTTP server: a Quart-Trio app on Hypercorn, behind a guard for each connection.

Programs that embed the server start `serve_http`, the whole server; or mount the app of
`create_app` and serve their own by `serve_app` (examples/mounted.py).
"""

from trouper.web.app import create_app
from trouper.web.server import serve_app, serve_http

__all__ = ["create_app", "serve_app", "serve_http"]
