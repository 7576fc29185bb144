"""What travels: messages, plans, requests, replies, settings. Imports nothing of ours."""
