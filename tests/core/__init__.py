"""The scheduler's core alone: no Trio, no clock but a counter."""
