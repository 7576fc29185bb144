"""What every handler uses: the request at hand, models by name, answers, the state database."""
