"""OpenAI's dialect, one file for each kind of body."""
