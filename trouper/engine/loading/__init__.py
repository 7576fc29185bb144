"""Makes the model that a setting names ready to run."""
