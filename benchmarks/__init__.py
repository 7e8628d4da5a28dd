"""What DeepInfer reaches, beside its peers and the machine's limits."""

import deepinfer_backend  # noqa: F401  before transformers: it makes torchvision importable
