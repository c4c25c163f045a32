"""The kinds of MLP that a decoder layer may have: one file each. A family names its kind."""
