"""Four tenants on one server, one of them hostile: what it leaves to the others, and what it sees
of them."""
