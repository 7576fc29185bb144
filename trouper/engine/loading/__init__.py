"""From a setting to a model that is ready to run."""
