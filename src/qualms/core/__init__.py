"""The paper's mathematics: arrays in, arrays out.

One module per idea, in the order in which data flows through them:
``kernels`` → ``selection`` → ``linalg`` → ``projected_process`` → ``resampling`` → ``members`` →
``likelihood`` → ``calibration`` → ``diagnostics``. `docs/equations.md` maps every equation to its
function.
"""
