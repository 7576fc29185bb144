"""The machine and the process: heap, memory, clocks, temporary files, child processes."""
