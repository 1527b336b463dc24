"""Formats of files with tensors, one module each: bytes -> tensors, by offset, with nothing unpickled or executed."""
