"""From the user's tensors to the packed format, and back."""
