"""C sources as text, compiled on first use into the user's cache."""
