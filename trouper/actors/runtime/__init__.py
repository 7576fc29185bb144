"""Surroundings of the actors: submissions and answers, channels, supervision, several models at
once."""
