"""The only folder that knows Triton: the model that it loads, and the launcher that starts a server."""
