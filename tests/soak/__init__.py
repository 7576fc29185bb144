"""Hours of mixed load on real servers: what memory, descriptors, tasks, files, latency and hit rate
do, judged by their slopes."""
