"""One file per verb of the command line; a function's docstring is its help."""
