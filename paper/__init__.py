"""The numbers, tables and figures of Musil et al. 2019: ``python -m paper``.

This is not a part of the package that is installed: run it in a checkout. It uses internals of the
training, to compute features, representatives and kernel rows once for all subsample sizes.
"""
