"""What Triton loads; the code is in the package."""

from deepinfer_backend.triton.tensorrtllm.postprocessing import TritonPythonModel

__all__ = ["TritonPythonModel"]
