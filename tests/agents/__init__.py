"""Real coding agents against a scripted server: each edits a file, in the formats of several model
families."""
