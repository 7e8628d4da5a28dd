"""What Triton loads; the code is in the package."""

from deepinfer_backend.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
