"""Packed tensors on GPUs: kernels compiled and launched, pinned host memory, and their use in PyTorch."""
