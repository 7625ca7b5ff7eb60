"""The commands, one file each: `parser()` gives its words, `run(arguments)` does the work."""
