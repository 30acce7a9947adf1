"""What needs an NVIDIA GPU and SGLang: the cost of capture, and whether its bits are right."""
