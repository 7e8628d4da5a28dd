"""Tests of DeepInfer for Triton."""

import deepinfer_backend  # noqa: F401  before transformers: it makes torchvision importable
