"""Layer converters: FP8 is one, this folder has others of its own."""
