"""Every engine that the benchmark can run: ours and the peers, each in a process of its own."""
