"""The version, here because Trouper also runs without installation."""

VERSION = "0.1.0"
