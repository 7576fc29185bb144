"""Combined faults on real servers by seeds, and what the documentation promises of them
afterwards."""
