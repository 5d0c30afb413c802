"""Learned draft heads: what one is (config.py), how files spell it (loading.py), how it drafts (reference.py)."""
