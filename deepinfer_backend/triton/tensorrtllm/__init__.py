"""The wire interface of Triton's TensorRT-LLM backend: its model repository, with one engine of ours behind it."""
