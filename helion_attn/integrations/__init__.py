"""The same attention under others' names, one library a file, and what these share."""
