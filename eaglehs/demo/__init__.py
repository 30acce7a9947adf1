"""The whole path on a tiny Kimi-shaped model: model, tokenizer and conversations made here."""
