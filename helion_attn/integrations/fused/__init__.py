"""Models of other libraries whose norms of Q and K and RoPE are fused into quantising."""
