"""outpace: the same words, faster. Lossless speculative decoding for Qwen3-family models."""

__version__ = "0.1.0"
