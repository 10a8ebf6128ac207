"""How a classifier holds up: the sets, the run over them, and the measures of the papers."""
