"""What a decoder computes: its tensors by name, and its forward pass in NumPy (the oracle)."""
