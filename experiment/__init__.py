"""A run and what keeps it: flags, folder, checkpoints, log, --check."""
