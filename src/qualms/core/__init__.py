"""The paper's mathematics: arrays in, arrays out.

One module per idea, in the order in which data flows through them:

- ``kernels``, ``selection``: similarities, and which points represent the others;
- ``linalg``, ``gaussian_process``, ``projected_process``, ``noise``: regression, exact and sparse;
- ``distinct``, ``resampling``, ``members``, ``committee``: sub-samples and their models;
- ``likelihood``, ``diagnostics``, ``scores``: how good predictions and error bars are;
- ``calibration``: from the spread between members to error bars that hold.

`docs/equations.md` maps every equation of the paper to its function.
"""
