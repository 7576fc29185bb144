"""Several ranks of one model: the leader, its followers, their links and their disks."""
