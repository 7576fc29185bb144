"""API keys at work: which right an endpoint needs."""
