"""Densities of neighbours and their derivatives, pair by pair: the compiled core of SOAP.

The density of an element a around atom i is expanded in radial functions R_nl and real spherical
harmonics Y_lm, Eq. (15), Musil et al. 2019: with r the vector to a neighbour and û its direction,

    c_anlm = Σ_r R_nl(r) Y_lm(û),
    ∂/∂r [R Y] = û Y (R′ − l R/r) + (R/r) ∇S_lm(û),

where S_lm(r) = r^l Y_lm(û) is a polynomial. R_nl is a cubic spline times the scaling u(r) and the
cutoff function f_cut(r) of Eq. (16). No array of derivatives of features by positions exists:
derivatives of energies by the densities are multiplied with those of the densities one run of pairs
at a time, the neighbours of one element around one atom. The pairs of a run are the innermost index
of all arrays, so that loops over them become vector instructions.

Results do not depend on what else is in a batch. The compiled code is kept in a cache beside this
file or in that of the user, and compiled each time if neither can be written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

#: Rounding may depend on the width of vectors; infinities and NaN are as in IEEE 754.
_FAST = {"contract", "reassoc", "nsz", "arcp"}
#: Pairs of a run in scratch memory at once: it fits into the fastest cache.
_RUN = 32


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call, or load it from the cache."""
    options: dict[str, Any] = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}
    try:
        return numba.njit(function, cache=True, **options)  # type: ignore[no-any-return]
    except RuntimeError:  # no directory for the cache can be written
        return numba.njit(function, **options)  # type: ignore[no-any-return]


# --- neighbours ---


@_compiled
def sort_pairs(  # type: ignore[no-untyped-def]
    positions, cell, i, j, shifts, places, n, kinds, n_kinds, cutoff
):
    """Return the pairs within the cutoff, by centre and by kind of the neighbour.

    Parameters
    ----------
    positions, cell : (n_atoms, 3) and (3, 3) arrays
    i, j, shifts : (p,), (p,) and (p, 3) arrays of int
        Centres, neighbours, and the lattice vectors between their cells.
    places : (n_atoms,) array of int
        Environment that each atom is the centre of, of n, or -1.
    kinds : (n_atoms,) array of int
        Of n_kinds.
    cutoff : float

    Returns
    -------
    start : (n·n_kinds + 1,) array of int
        Where the runs of pairs of each centre and kind begin.
    neighbours : (P,) array of int
    vectors : (3, P) array
        From centre to neighbour.
    """
    n_pairs = len(i)
    start = np.zeros(n * n_kinds + 1, np.int64)
    vectors = np.empty((3, n_pairs))
    run = np.empty(n_pairs, np.int64)
    for p in range(n_pairs):
        a, b = i[p], j[p]
        run[p] = -1
        if places[a] < 0:
            continue
        square = 0.0
        for x in range(3):
            d = positions[b, x] - positions[a, x]
            for y in range(3):
                d += shifts[p, y] * cell[y, x]
            vectors[x, p] = d
            square += d * d
        if square < cutoff * cutoff:
            run[p] = places[a] * n_kinds + kinds[b]
            start[run[p] + 1] += 1
    for k in range(n * n_kinds):
        start[k + 1] += start[k]
    place = start[:-1].copy()
    neighbours = np.empty(start[-1], np.int64)
    ordered = np.empty((3, start[-1]))
    for p in range(n_pairs):
        if run[p] >= 0:
            q = place[run[p]]
            place[run[p]] += 1
            neighbours[q] = j[p]
            for x in range(3):
                ordered[x, q] = vectors[x, p]
    return start, neighbours, ordered


# --- radial functions and spherical harmonics of a run of pairs ---


@_compiled
def _directions(vectors, first, P, u, r):  # type: ignore[no-untyped-def]
    """Fill in the unit vectors u (3, P) and distances r (P,) of a run."""
    for p in range(P):
        x, y, z = vectors[0, first + p], vectors[1, first + p], vectors[2, first + p]
        d = np.sqrt(x * x + y * y + z * z)
        r[p] = d
        u[0, p], u[1, p], u[2, p] = x / d, y / d, z / d


@_compiled
def _radial(r, P, table, lowest, step, shape, l_max, n_radial, R, E, slopes):  # type: ignore[no-untyped-def]
    """Fill in the radial functions of a run, by l and n: (w, P).

    Parameters
    ----------
    r : (P,) array
    table : (n_knots, 2, w) array
        Values and derivatives times the step at the knots, counted from number `lowest`.
    shape : (5,) array
        Cutoff; width of f_cut, or 0; scale, exponent and rate of u, or 0.
    slopes : bool
        R is R/r and E is R′ − l R/r, rather than R.
    """
    cutoff, width, scale, exponent, rate = shape[0], shape[1], shape[2], shape[3], shape[4]
    for p in range(P):
        d = r[p]
        k = min(max(int(d / step) - lowest, 0), len(table) - 2)
        t = d / step - (k + lowest)
        f, df = 1.0, 0.0
        if width > 0 and d > cutoff - width:
            phase = np.pi * (d - cutoff + width) / width
            f, df = 0.5 * (1 + np.cos(phase)), -0.5 * np.pi / width * np.sin(phase)
        if rate > 0:
            power = (d / scale) ** exponent
            u = rate / (rate + power)
            du = -u * power * exponent / (d * (rate + power))
            f, df = f * u, df * u + f * du
        w = 0
        for l in range(l_max + 1):  # noqa: E741
            for _ in range(n_radial):
                a, b = table[k, 0, w], table[k + 1, 0, w]
                s, e = table[k, 1, w], table[k + 1, 1, w]
                second, third = 3 * (b - a) - 2 * s - e, 2 * (a - b) + s + e
                value = a + t * (s + t * (second + t * third))
                if slopes:
                    slope = (s + t * (2 * second + 3 * t * third)) / step
                    R[w, p] = value * f / d
                    E[w, p] = slope * f + value * df - l * value * f / d
                else:
                    R[w, p] = value * f
                w += 1


@_compiled
def _harmonics(u, P, l_max, norms, cosine, sine, Q, Y, D, slopes):  # type: ignore[no-untyped-def]
    """Fill in Y_lm of a run ((l_max + 1)², P), and D, the slopes of S_lm (3, (l_max + 1)², P).

    With S_lm = N_lm Q_lm(z, r) Re or Im (x + iy)^m, at r = 1: ∂Q_lm/∂x = x Q_l−1,m+1 and
    ∂Q_lm/∂z = (l + m) Q_l−1,m. `norms` (l_max + 1, l_max + 1) are N_lm.
    """
    x, y, z = u[0], u[1], u[2]
    for p in range(P):
        cosine[0, p], sine[0, p] = 1.0, 0.0
    for m in range(l_max):
        for p in range(P):
            cosine[m + 1, p] = x[p] * cosine[m, p] - y[p] * sine[m, p]
            sine[m + 1, p] = x[p] * sine[m, p] + y[p] * cosine[m, p]
    for l in range(l_max + 1):  # noqa: E741
        for m in range(l + 1):
            if m == l:
                if l == 0:
                    for p in range(P):
                        Q[l, m, p] = 1.0
                else:
                    for p in range(P):
                        Q[l, m, p] = -(2 * l - 1) * Q[l - 1, l - 1, p]
            elif m == l - 1:
                for p in range(P):
                    Q[l, m, p] = (2 * m + 1) * z[p] * Q[m, m, p]
            else:
                a, b = (2 * l - 1) / (l - m), (l + m - 1) / (l - m)
                for p in range(P):
                    Q[l, m, p] = a * z[p] * Q[l - 1, m, p] - b * Q[l - 2, m, p]
        for m in range(l + 1):
            f, plus, minus = norms[l, m], l * l + l + m, l * l + l - m
            for p in range(P):
                Y[plus, p] = f * Q[l, m, p] * cosine[m, p]
            if m:
                for p in range(P):
                    Y[minus, p] = f * Q[l, m, p] * sine[m, p]
            if not slopes:
                continue
            for p in range(P):
                around = x[p] * Q[l - 1, m + 1, p] if m < l - 1 else 0.0
                turn = m * cosine[m - 1, p] * Q[l, m, p] if m else 0.0
                D[0, plus, p] = f * (around * cosine[m, p] + turn)
            for p in range(P):
                around = y[p] * Q[l - 1, m + 1, p] if m < l - 1 else 0.0
                turn = m * sine[m - 1, p] * Q[l, m, p] if m else 0.0
                D[1, plus, p] = f * (around * cosine[m, p] - turn)
            for p in range(P):
                along = (l + m) * Q[l - 1, m, p] if m < l else 0.0
                D[2, plus, p] = f * along * cosine[m, p]
            if m:
                for p in range(P):
                    around = x[p] * Q[l - 1, m + 1, p] if m < l - 1 else 0.0
                    D[0, minus, p] = f * (around * sine[m, p] + m * sine[m - 1, p] * Q[l, m, p])
                for p in range(P):
                    around = y[p] * Q[l - 1, m + 1, p] if m < l - 1 else 0.0
                    D[1, minus, p] = f * (around * sine[m, p] + m * cosine[m - 1, p] * Q[l, m, p])
                for p in range(P):
                    along = (l + m) * Q[l - 1, m, p] if m < l else 0.0
                    D[2, minus, p] = f * along * sine[m, p]


# --- densities and power spectra ---


@_compiled
def expand(start, vectors, n_kinds, l_max, n_radial, table, lowest, step, shape, norms, c):  # type: ignore[no-untyped-def]
    """Add the densities of neighbours to c (n, (l_max + 1)², n_kinds, n_radial)."""
    q, w = (l_max + 1) ** 2, (l_max + 1) * n_radial
    u, r = np.empty((3, _RUN)), np.empty(_RUN)
    R, Y = np.empty((w, _RUN)), np.empty((q, _RUN))
    cosine, sine = np.empty((l_max + 1, _RUN)), np.empty((l_max + 1, _RUN))
    Q, D = np.empty((l_max + 1, l_max + 2, _RUN)), np.empty((3, 1, 1))
    for i in range(len(c)):
        for a in range(n_kinds):
            end = start[i * n_kinds + a + 1]
            for first in range(start[i * n_kinds + a], end, _RUN):
                P = min(_RUN, end - first)
                _directions(vectors, first, P, u, r)
                _radial(r, P, table, lowest, step, shape, l_max, n_radial, R, R, False)
                _harmonics(u, P, l_max, norms, cosine, sine, Q, Y, D, False)
                lm = 0
                for l in range(l_max + 1):  # noqa: E741
                    for _ in range(2 * l + 1):
                        for n in range(n_radial):
                            total = 0.0
                            for p in range(P):
                                total += Y[lm, p] * R[l * n_radial + n, p]
                            c[i, lm, a, n] += total
                        lm += 1


@_compiled
def contract(c, factors, spectra):  # type: ignore[no-untyped-def]
    """Fill in the power spectra of Eq. (14): (n, pairs of kinds, l_max + 1, n_radial, n_radial).

    Pairs a ≤ b are in the order of a, then of b. `factors` (2, l_max + 1) are those of each l, for
    a = b and for a < b.
    """
    n, _, n_kinds, n_radial = c.shape
    wide = n_kinds * n_radial
    full = np.empty((wide, wide))
    for i in range(n):
        lm = 0
        for l in range(factors.shape[1]):  # noqa: E741
            full[:] = 0.0
            for _ in range(2 * l + 1):
                row = c[i, lm].reshape(wide)
                for s in range(wide):
                    for t in range(s // n_radial * n_radial, wide):
                        full[s, t] += row[s] * row[t]
                lm += 1
            pair = 0
            for a in range(n_kinds):
                for b in range(a, n_kinds):
                    f = factors[int(a < b), l]
                    for k in range(n_radial):
                        for m in range(n_radial):
                            spectra[i, pair, l, k, m] = f * full[a * n_radial + k, b * n_radial + m]
                    pair += 1


# --- backward: derivatives of energies ---


@_compiled
def pull_spectra(c, slopes, factors, g):  # type: ignore[no-untyped-def]
    """Fill in the derivatives by the densities: (n, n_kinds, (l_max + 1)², n_radial, R).

    Given those by the power spectra, `slopes` (n, pairs, l_max + 1, n_radial, n_radial, R).
    """
    n, _, n_kinds, n_radial = c.shape
    R, wide = g.shape[4], n_kinds * n_radial
    matrix, row = np.empty((wide, wide, R)), np.empty((wide, R))
    for i in range(n):
        first = 0
        for l in range(factors.shape[1]):  # noqa: E741
            # The matrix of slopes by products of any two densities, symmetric.
            pair = 0
            for a in range(n_kinds):
                for b in range(a, n_kinds):
                    f = factors[int(a < b), l]
                    for k in range(n_radial):
                        for m in range(n_radial):
                            s, t = a * n_radial + k, b * n_radial + m
                            for e in range(R):
                                value = slopes[i, pair, l, k, m, e]
                                if a == b:
                                    value += slopes[i, pair, l, m, k, e]
                                matrix[s, t, e] = f * value
                            if a < b:
                                for e in range(R):
                                    matrix[t, s, e] = matrix[s, t, e]
                    pair += 1
            flat = matrix.reshape(wide, wide * R)
            for lm in range(first, first + 2 * l + 1):
                total, of_lm = row.reshape(wide * R), c[i, lm].reshape(wide)
                total[:] = 0.0
                for s in range(wide):
                    value = of_lm[s]
                    for t in range(wide * R):
                        total[t] += value * flat[s, t]
                for a in range(n_kinds):
                    for k in range(n_radial):
                        for e in range(R):
                            g[i, a, lm, k, e] = row[a * n_radial + k, e]
            first += 2 * l + 1


@_compiled
def pull_densities(  # type: ignore[no-untyped-def]
    start, vectors, l_max, n_radial, table, lowest, step, shape, norms, g,
    centers, neighbours, forces, owners, strain,
):  # fmt: skip
    """Add derivatives by positions to forces (n_atoms, 3, R), and by strain (n_structures, 6, R).

    Given those by the densities, g (n, n_kinds, (l_max + 1)², n_radial, R). Without structures,
    derivatives by strain are not computed.
    """
    n, n_kinds, q, _, R = g.shape
    w = (l_max + 1) * n_radial
    u, r = np.empty((3, _RUN)), np.empty(_RUN)
    radial, slope, Y = np.empty((w, _RUN)), np.empty((w, _RUN)), np.empty((q, _RUN))
    cosine, sine = np.empty((l_max + 1, _RUN)), np.empty((l_max + 1, _RUN))
    Q, D = np.empty((l_max + 1, l_max + 2, _RUN)), np.empty((3, q, _RUN))
    A, B = np.empty(_RUN), np.empty(_RUN)
    changes = np.empty(q * n_radial * 3 * _RUN if R > 1 else 1)
    pulled = np.empty(R * 3 * _RUN)
    for i in range(n):
        for a in range(n_kinds):
            end = start[i * n_kinds + a + 1]
            for first in range(start[i * n_kinds + a], end, _RUN):
                P = min(_RUN, end - first)
                _directions(vectors, first, P, u, r)
                _radial(r, P, table, lowest, step, shape, l_max, n_radial, radial, slope, True)
                _harmonics(u, P, l_max, norms, cosine, sine, Q, Y, D, True)
                of_pairs = pulled[: R * 3 * P].reshape(R, 3 * P)
                if R == 1:
                    of_pairs[:] = 0.0
                    lm = 0
                    for l in range(l_max + 1):  # noqa: E741
                        for _ in range(2 * l + 1):
                            A[:P] = 0.0
                            B[:P] = 0.0
                            for k in range(n_radial):
                                value = g[i, a, lm, k, 0]
                                row = l * n_radial + k
                                for p in range(P):
                                    A[p] += value * radial[row, p]
                                for p in range(P):
                                    B[p] += value * slope[row, p]
                            for p in range(P):
                                B[p] *= Y[lm, p]
                            for x in range(3):
                                for p in range(P):
                                    of_pairs[0, x * P + p] += u[x, p] * B[p] + D[x, lm, p] * A[p]
                            lm += 1
                else:
                    of_densities = changes[: q * n_radial * 3 * P].reshape(q * n_radial, 3 * P)
                    _fill_changes(u, Y, D, radial, slope, P, l_max, n_radial, of_densities)
                    flat = g[i, a].reshape(q * n_radial, R)
                    np.dot(flat.T, of_densities, of_pairs)
                for p in range(P):
                    j = neighbours[first + p]
                    for x in range(3):
                        for e in range(R):
                            forces[j, x, e] += of_pairs[e, x * P + p]
                        for e in range(R):
                            forces[centers[i], x, e] -= of_pairs[e, x * P + p]
                if len(strain):
                    for v in range(6):
                        x = v if v < 3 else (1 if v == 3 else 0)
                        y = v if v < 3 else (1 if v == 5 else 2)
                        for p in range(P):
                            d = vectors[y, first + p]
                            for e in range(R):
                                strain[owners[i], v, e] += of_pairs[e, x * P + p] * d


# --- forward: changes of power spectra ---


@_compiled
def _fill_changes(u, Y, D, radial, slope, P, l_max, n_radial, changes):  # type: ignore[no-untyped-def]
    """Fill in the changes of densities with the vectors of a run: ((lm, n), (3, P))."""
    row = lm = 0
    for l in range(l_max + 1):  # noqa: E741
        for _ in range(2 * l + 1):
            for k in range(n_radial):
                w = l * n_radial + k
                for x in range(3):
                    for p in range(P):
                        along = u[x, p] * Y[lm, p] * slope[w, p]
                        changes[row, x * P + p] = along + D[x, lm, p] * radial[w, p]
                row += 1
            lm += 1


@_compiled
def _project(c, changes, l_max, matrices, edges, products):  # type: ignore[no-untyped-def]
    """Return the changes of features (Σk, w) with those of densities ((lm, n), w) of an element.

    Parameters
    ----------
    c : ((l_max + 1)², K, n_radial) array
        Densities around the atom.
    changes : ((l_max + 1)²·n_radial, w) array
    matrices : (Σk, (l_max + 1)·n_radial²) array
        Rows of Qᵀ for the element and each of K species, one species after the other.
    edges : (K + 1,) array of int
        Where those of each species begin.
    products : array
        Scratch memory.
    """
    _, K, n_radial = c.shape
    size, width = (l_max + 1) * n_radial**2, changes.shape[1]
    found = np.empty((edges[K], width))
    of_species = products[: size * width].reshape(size, width)
    for b in range(K):
        if edges[b] == edges[b + 1]:
            continue
        row = 0
        for l in range(l_max + 1):  # noqa: E741
            for k in range(n_radial):
                for m in range(n_radial):
                    of_species[row] = 0.0
                    for lm in range(l * l, (l + 1) ** 2):
                        value, source = c[lm, b, m], lm * n_radial + k
                        for p in range(width):
                            of_species[row, p] += value * changes[source, p]
                    row += 1
        np.dot(matrices[edges[b] : edges[b + 1]], of_species, found[edges[b] : edges[b + 1]])
    return found


@_compiled
def push_densities(  # type: ignore[no-untyped-def]
    start, vectors, a, n_kinds, l_max, n_radial, table, lowest, step, shape, norms,
    c, matrices, edges, places, values, strain,
):  # fmt: skip
    """Add changes of features with the vectors of pairs, and with strain.

    Parameters
    ----------
    a : int
        Kind of the neighbours.
    c : (n, (l_max + 1)², K, n_radial) array
    matrices, edges
        See `_project`.
    places : (Σk,) array of int
        Features that the rows of the matrices belong to, as they are counted in the values.
    values : (P, 3, k) array
        Of the pairs of this kind; not computed if it is empty.
    strain : (n, 6, k) array
        Not computed if it is empty.
    """
    q, w = (l_max + 1) ** 2, (l_max + 1) * n_radial
    u, r = np.empty((3, _RUN)), np.empty(_RUN)
    radial, slope, Y = np.empty((w, _RUN)), np.empty((w, _RUN)), np.empty((q, _RUN))
    cosine, sine = np.empty((l_max + 1, _RUN)), np.empty((l_max + 1, _RUN))
    Q, D = np.empty((l_max + 1, l_max + 2, _RUN)), np.empty((3, q, _RUN))
    changes, products = np.empty(q * n_radial * 3 * _RUN), np.empty(w * n_radial * 3 * _RUN)
    stretched, done = np.empty((q * n_radial, 6)), 0
    for i in range(len(c)):
        run = i * n_kinds + a
        stretched[:] = 0.0
        for first in range(start[run], start[run + 1], _RUN):
            P = min(_RUN, start[run + 1] - first)
            _directions(vectors, first, P, u, r)
            _radial(r, P, table, lowest, step, shape, l_max, n_radial, radial, slope, True)
            _harmonics(u, P, l_max, norms, cosine, sine, Q, Y, D, True)
            of_densities = changes[: q * n_radial * 3 * P].reshape(q * n_radial, 3 * P)
            _fill_changes(u, Y, D, radial, slope, P, l_max, n_radial, of_densities)
            if len(values):
                found = _project(c[i], of_densities, l_max, matrices, edges, products)
                for row in range(len(found)):
                    for x in range(3):
                        for p in range(P):
                            values[done + p, x, places[row]] += found[row, x * P + p]
            if len(strain):
                for v in range(6):
                    x = v if v < 3 else (1 if v == 3 else 0)
                    y = v if v < 3 else (1 if v == 5 else 2)
                    for row in range(q * n_radial):
                        for p in range(P):
                            stretched[row, v] += (
                                of_densities[row, x * P + p] * vectors[y, first + p]
                            )
            done += P
        if len(strain) and start[run + 1] > start[run]:
            found = _project(c[i], stretched, l_max, matrices, edges, products)
            for row in range(len(found)):
                for v in range(6):
                    strain[i, v, places[row]] += found[row, v]
