"""Dataset to README.md."""
