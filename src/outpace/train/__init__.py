"""Training of draft heads: prompts, the target's own answers, a head in PyTorch, export."""
