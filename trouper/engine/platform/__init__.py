"""The device, its libraries, and the evaluation of lazy arrays."""
