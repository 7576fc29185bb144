"""Which Trouper this is. Here, since not every Trouper that runs is installed as a package."""

VERSION = "0.1.0"
