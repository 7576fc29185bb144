"""Files of model families in the forms of their makers, played by `just zoo-files`."""
