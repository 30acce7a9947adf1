"""Extractions that are killed at seeded moments and started again: see matrix.py."""
