"""Inputs of the tests, made when a test runs: no compiled file is kept in the repository.

The builders write the formats from their public descriptions with `struct` alone and import nothing from gpubloat, so
that a mistake in a reader cannot hide in the file that should show it.
"""
