"""Recorded sessions, and the formats in which others publish theirs."""
