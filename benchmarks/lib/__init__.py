"""What several suites share, and nothing that only one of them needs."""
