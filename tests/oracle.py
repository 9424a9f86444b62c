"""Brute force, written for reading: the oracle that the fast code is tested against.

Explicit inverses and Python loops throughout. Nothing here is fast, and nothing here is shared with the package.
"""
