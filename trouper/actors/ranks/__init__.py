"""Several ranks of one model: the leader, followers, links and disks."""
