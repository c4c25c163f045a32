"""Silent faults that others have published, injected one by one into toy runs: which gauge notices,
and how soon."""
