"""The training state as shards: hash, comparison, storage."""
