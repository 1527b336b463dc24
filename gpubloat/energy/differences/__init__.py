"""Two functions that should compute the same: `flow.diff`."""
