"""OpenAI's files and batches: requests in a file, answered at the lowest priority, across
restarts."""
