"""A folder for `sys.path`: SageAttention's name, and the metadata by which tools look for its version."""
