"""The command, one file per word: reads what the user wrote, starts what does it, says how it ended."""
