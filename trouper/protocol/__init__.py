"""Data that travels between packages: messages, plans, requests, replies, settings. Imports nothing
of ours."""
