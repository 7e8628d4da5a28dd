"""Models: finding and loading them, and running them over the paged KV cache."""
