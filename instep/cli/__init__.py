"""The command, one file per word: parses the arguments, starts the work, reports the outcome."""
