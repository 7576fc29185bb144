"""OpenAI's responses API, one file for each kind of body, and the store of responses."""
