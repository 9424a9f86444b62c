"""The command line: ``qualms train``, ``predict``, ``evaluate``, ``info`` and ``demo``."""

from qualms.cli.app import main

__all__ = ["main"]
