"""What computes states: `sglang` (a patched server) or `transformers` (in this process)."""
