"""The same attention under others' names, one library a file, what these share, and fused models in `fused/`."""
