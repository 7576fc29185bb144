"""The device, its libraries, and when it computes."""
