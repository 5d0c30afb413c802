"""Drafters guess the next tokens: propose(state) -> Draft, observe(verdict)."""
