"""Messages, plans, requests, replies and settings. Imports no other package of Trouper."""
