"""Products with weight matrices for which the device's library is slow."""
