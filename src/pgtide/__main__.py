"""`python -m pgtide` is `pgtide`."""

from pgtide.cli import main

main()
