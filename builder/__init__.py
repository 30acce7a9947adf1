"""Dumps to shards to tensors: plan, check, write, index, verify, read."""
