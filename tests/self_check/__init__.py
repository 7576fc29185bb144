"""The self-check: what it turns off, what it leaves on, and what it remembers."""
