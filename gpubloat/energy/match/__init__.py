"""Which tensors of two captures are equal, and which operators of each lie between them: `regions.match`."""
