"""What the tests share: problems and their right answers, compilers without a GPU, and stand-ins."""
