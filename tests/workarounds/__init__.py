"""Workarounds: what each mends, and whether the dependency still has the fault."""
