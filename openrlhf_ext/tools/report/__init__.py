"""One page about one or more runs, from the files in their folders."""
