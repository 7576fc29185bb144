"""Used by every handler: the request at hand, models by name, answers, the state database."""
