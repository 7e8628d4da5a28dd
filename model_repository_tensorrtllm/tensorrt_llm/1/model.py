"""What Triton loads; the code is in the package."""

from deepinfer_backend.triton.tensorrtllm.model import TensorrtLlmModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
