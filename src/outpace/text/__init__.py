"""Text <-> tokens: tokenizer, chat template, streaming detokeniser."""
