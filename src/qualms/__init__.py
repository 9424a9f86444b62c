"""Honest error bars for chemical machine learning."""

__version__ = "0.1.0.dev0"
