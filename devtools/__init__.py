"""Tools for who works on this package. No wheel has them, and the package imports none."""
