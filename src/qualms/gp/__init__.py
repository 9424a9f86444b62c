"""Sparse Gaussian process regression: pure mathematics, NumPy and SciPy only."""
