"""Makes a multi-token-prediction module for a model that has none, from text that the model writes itself."""
