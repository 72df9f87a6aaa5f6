"""A run beside its algorithm: flags, folder, checkpoints, log, --check."""
