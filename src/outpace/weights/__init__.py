"""Bytes of model files -> named arrays. Knows no model."""
