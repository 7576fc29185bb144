"""OpenAI's responses API: one file for each thing that travels, and the store."""
