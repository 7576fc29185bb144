"""Images: encoders, and their vectors."""
