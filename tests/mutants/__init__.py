"""Hand-written mutants of the package: small faults, each with the tests that must notice it (`just
mutants`)."""
