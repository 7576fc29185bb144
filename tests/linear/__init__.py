"""Texts of others take time in proportion to their length: regular expressions, parsers and
scanners."""
