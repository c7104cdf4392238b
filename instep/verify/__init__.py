"""Is the distributed gradient that of one process? A trial on the user's own model, and what it found."""
