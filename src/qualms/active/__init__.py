"""Active learning: which structures to label next."""

from qualms.active.select import Selection, select

__all__ = ["Selection", "select"]
