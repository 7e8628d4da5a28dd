"""Images and videos: how requests bring them, and the processes that make of them what a model computes with."""
