"""Every check of arguments, and nothing else."""
