"""The picture of what a method does to the tokens of a group of completions (docs/explain.md)."""
