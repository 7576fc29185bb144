"""A real server whose model says what a script says, in a family's own format: for clients and
agents that call tools."""
