"""Which sample stands where in the stream, and the data sets that hand samples over in fresh memory."""
