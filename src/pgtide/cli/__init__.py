"""The command line.  Commands import what they need when they run: `pgtide --help` answers at once."""

from pgtide.cli.app import main

__all__ = ["main"]
