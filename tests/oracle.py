"""Brute force, written for reading: the oracle that the fast code is tested against.

Explicit inverses and Python loops throughout. Nothing here is fast, and nothing is shared with the
package.
"""

import math
from statistics import NormalDist

import numpy as np

# --- likelihood, scores, diagnostics ---


def gaussian_log_likelihood(z, std, variance_scale=1.0):
    """Eqs. (6)-(8) as a mean: the logarithm of each density, added up one by one."""
    total = 0.0
    for z_n, s_n in zip(z, std, strict=True):
        variance = variance_scale * s_n**2
        density = math.exp(-(z_n**2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)
        total += math.log(density)
    return total / len(z)


def student_density(z, scale, dof):
    """The Student t density of one point, by its definition."""
    norm = math.gamma((dof + 1) / 2) / (math.gamma(dof / 2) * math.sqrt(dof * math.pi) * scale)
    return norm * (1 + (z / scale) ** 2 / dof) ** (-(dof + 1) / 2)


def crps_gaussian(z, std, n_steps=20_000, reach=12.0):
    """The defining integral of one point's CRPS, by the midpoint rule.

    The steps start and end at the reference value, where the integrand jumps.
    """
    cdf = np.frompyfunc(NormalDist(0.0, std).cdf, 1, 1)
    total = 0.0
    for start, end, reference_below in ((-reach * std, z, 0.0), (z, reach * std + abs(z), 1.0)):
        step = (end - start) / n_steps
        x = start + (np.arange(n_steps) + 0.5) * step
        total += float(np.sum((cdf(x).astype(float) - reference_below) ** 2)) * step
    return total


def crps_ensemble(y, members, fair):
    """Mean distance to the reference value minus half that between members, pair by pair."""
    total = 0.0
    for y_n, x in zip(y, members, strict=True):
        r = len(x)
        to_reference = sum(abs(x_i - y_n) for x_i in x) / r
        pairs = sum(abs(x_i - x_j) for x_i in x for x_j in x)
        total += to_reference - pairs / (2 * r * (r - 1) if fair else 2 * r * r)
    return total / len(y)


def central_coverage(z, std, level):
    """The fraction of points inside the central Gaussian interval, counted."""
    q = NormalDist().inv_cdf((1 + level) / 2)
    inside = sum(1 for z_n, s_n in zip(z, std, strict=True) if -q * s_n <= z_n <= q * s_n)
    return inside / len(z)


def miscalibration_area(z, std, n_levels=5000):
    """The area between the calibration curve and the diagonal, by the midpoint rule."""
    total = 0.0
    for k in range(n_levels):
        level = (k + 0.5) / n_levels
        total += abs(central_coverage(z, std, level) - level) / n_levels
    return total


def rms_calibration_error(z, std):
    """As uncertainty-toolbox has it: at 100 levels from 0 (points without error) to 1 (all)."""
    total = (sum(1 for z_n in z if z_n == 0) / len(z)) ** 2
    for k in range(1, 99):
        total += (central_coverage(z, std, k / 99) - k / 99) ** 2
    return math.sqrt(total / 100)


def binned_errors(z, std, n_bins):
    """Lists of (RMV, RMSE, count, standard errors) of bins of equal count; for distinct std."""
    points = sorted(zip(std, z, strict=True))
    bins = []
    for b in range(n_bins):
        chosen = points[b * len(points) // n_bins : (b + 1) * len(points) // n_bins]
        columns = []
        for column in (0, 1):
            squares = [p[column] ** 2 for p in chosen]
            mean = sum(squares) / len(squares)
            variance = sum((s - mean) ** 2 for s in squares) / (len(squares) - 1)
            root = math.sqrt(mean)
            columns.append((root, math.sqrt(variance / len(squares)) / (2 * root)))
        (rmv, rmv_err), (rmse, rmse_err) = columns
        bins.append((rmv, rmse, len(chosen), rmv_err, rmse_err))
    return bins


def ence(z, std, n_bins):
    """The mean over bins of |RMV - RMSE| / RMV."""
    bins = binned_errors(z, std, n_bins)
    return sum(abs(b[0] - b[1]) / b[0] for b in bins) / n_bins


def interval_score(z, std, level):
    """The interval score of Gneiting and Raftery (2007), Eq. (43), bound by bound."""
    q = NormalDist().inv_cdf((1 + level) / 2)
    total = 0.0
    for z_n, s_n in zip(z, std, strict=True):
        lower, upper = -q * s_n, q * s_n
        total += upper - lower
        if z_n < lower:
            total += 2 / (1 - level) * (lower - z_n)
        if z_n > upper:
            total += 2 / (1 - level) * (z_n - upper)
    return total / len(z)


def spearman(z, std):
    """Pearson's correlation of ranks, each rank found by counting."""

    def ranks(values):
        return [
            sum(1 for w in values if w < v) + (sum(1 for w in values if w == v) + 1) / 2
            for v in values
        ]

    a, b = ranks([abs(v) for v in z]), ranks(list(std))
    a_mean, b_mean = sum(a) / len(a), sum(b) / len(b)
    cross = sum((i - a_mean) * (j - b_mean) for i, j in zip(a, b, strict=True))
    a_norm = sum((i - a_mean) ** 2 for i in a)
    b_norm = sum((j - b_mean) ** 2 for j in b)
    return cross / math.sqrt(a_norm * b_norm)


def conditional_density(ln_sigma, ln_error, bandwidth, grid_sigma, grid_error):
    """Eq. (18) by kernel sums over all pairs: joint density over marginal, and the marginal."""
    density, marginal = [], []
    for x in grid_sigma:
        near = [NormalDist(s, bandwidth[0]).pdf(x) for s in ln_sigma]
        marginal.append(sum(near) / len(ln_sigma))
        row = []
        for e in grid_error:
            joint = [
                w * NormalDist(v, bandwidth[1]).pdf(e) for w, v in zip(near, ln_error, strict=True)
            ]
            row.append(sum(joint) / sum(near))
        density.append(row)
    return np.array(density), np.array(marginal)


# --- kernels ---


def power_kernel(X, Y, exponent, offset=0.0):
    """Eq. (13) to the power ζ, one pair at a time."""
    K = np.zeros((len(X), len(Y)))
    for i, x in enumerate(X):
        for j, y in enumerate(Y):
            dot = sum(float(a) * float(b) for a, b in zip(x, y, strict=True))
            K[i, j] = ((dot + offset) / (1 + offset)) ** exponent
    return K


def rbf_kernel(X, Y, length_scale):
    K = np.zeros((len(X), len(Y)))
    for i, x in enumerate(X):
        for j, y in enumerate(Y):
            distance2 = sum((float(a) - float(b)) ** 2 for a, b in zip(x, y, strict=True))
            K[i, j] = math.exp(-distance2 / (2 * length_scale**2))
    return K


# --- Gaussian processes ---


def exact_gp(K_NN, K_XN, K_XX, y, noise):
    """Eqs. (1) and (2): mean and covariance of the latent function; noise may be one per sample."""
    inverse = np.linalg.inv(K_NN + np.diag(np.broadcast_to(noise, len(y))))
    return K_XN @ inverse @ y, K_XX - K_XN @ inverse @ K_XN.T


def projected_process(K_MM, K_NM, K_XM, K_XX, y, noise, weights=None):
    """Eq. (3), with σ⁻² in the mean: mean, and covariance without noise."""
    W = np.eye(len(y)) if weights is None else np.diag(weights)
    K_tilde = K_MM + K_NM.T @ W @ K_NM / noise
    inverse = np.linalg.inv(K_tilde)
    mean = K_XM @ inverse @ K_NM.T @ W @ y / noise
    Q_XX = K_XM @ np.linalg.inv(K_MM) @ K_XM.T
    return mean, K_XX - Q_XX + K_XM @ inverse @ K_XM.T


def leave_one_out(fit_and_predict, n):
    """Call ``fit_and_predict(kept rows, row left out)`` for every row."""
    return np.array([fit_and_predict([j for j in range(n) if j != i], i) for i in range(n)])


# --- resampling and calibration ---


def committee(members):
    """Eq. (4)."""
    mean = sum(members) / len(members)
    return mean, math.sqrt(sum((m - mean) ** 2 for m in members) / (len(members) - 1))


def out_of_bag_prediction(members, absent, min_absent):
    """Eqs. (10) and (11), point by point."""
    rows = []
    for n in range(len(members)):
        unseen = [members[n][i] for i in range(len(members[n])) if absent[n][i]]
        if len(unseen) >= min_absent:
            rows.append((n, *committee(unseen), len(unseen)))
    return rows


def shrinkage_joint(z, s_hat, c, alpha, gamma, m, tau, n_steps=4001):
    """p(z, ln ŝ) and the posterior mean of the variance given ŝ alone, on a dense grid of ln s."""
    joint = marginal = variance = 0.0
    nu = c - 1
    grid = np.linspace(math.log(s_hat) - 12, math.log(s_hat) + 12, n_steps)
    step = grid[1] - grid[0]
    for u in grid:
        s = math.exp(u)
        prior = math.exp(-0.5 * ((u - m) / tau) ** 2) / (tau * math.sqrt(2 * math.pi))
        q = nu * s_hat**2 / s**2
        log_chi2 = (nu / 2 - 1) * math.log(q) - q / 2 - nu / 2 * math.log(2) - math.lgamma(nu / 2)
        of_std = 2 * q * math.exp(log_chi2)  # density of ln ŝ
        v = alpha**2 * s ** (2 * gamma) + s**2 / c
        of_residual = math.exp(-0.5 * z**2 / v) / math.sqrt(2 * math.pi * v)
        joint += step * prior * of_std * of_residual
        marginal += step * prior * of_std
        variance += step * prior * of_std * v
    return joint, marginal, variance / marginal


# --- selection ---


def rounded(x):
    """x to 14 binary digits."""
    if x == 0:
        return 0.0
    unit = 2.0 ** (math.floor(math.log2(x)) + 1 - 14)
    return unit * round(x / unit)


def farthest_points(X, n):
    """The textbook loop on explicit differences: indices, and distances to the picks before."""
    X = np.asarray(X, dtype=np.float64)
    indices, distances = [0], [np.inf]

    def squares(pick):
        return np.array([rounded(np.sum((x - X[pick]) ** 2)) for x in X])

    nearest = squares(0)
    while len(indices) < n:
        pick = int(np.argmax(nearest))
        if nearest[pick] == 0:
            break
        indices.append(pick)
        distances.append(math.sqrt(nearest[pick]))
        nearest = np.minimum(nearest, squares(pick))
    return indices, distances
