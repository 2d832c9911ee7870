"""Edits of Triton's IR and PTX, one a file."""
