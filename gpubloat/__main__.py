"""``python -m gpubloat``."""

from gpubloat.cli import main

main()
