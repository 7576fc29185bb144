"""Clients' own configurations: what each needs to use this server, and how their files are changed
without loss."""
