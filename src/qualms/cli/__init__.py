"""The command line: ``qualms VERB``, one module per verb."""

from qualms.cli.app import main

__all__ = ["main"]
