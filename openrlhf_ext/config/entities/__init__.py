"""One frozen model per entity of the configuration; the option names are the paths through these models."""
