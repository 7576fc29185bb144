"""Access log, request log, spans and health."""
