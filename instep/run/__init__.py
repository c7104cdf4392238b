"""What any training script gets from a run: its folder, metrics, ledger, comparison, summary and report."""
