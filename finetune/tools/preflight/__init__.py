"""What is tried before a run: `--dry-run`, `--smoke`, `training.auto_batch`."""
