"""Tools beside the core: they import it and are never imported by it."""
