"""metatomic: a model as a file that needs no qualms to run, in plain torch.

The file has the arrays of the model, and the code of this module as TorchScript: the densities and
power spectra of Eqs. (14) and (15), Musil et al. 2019, the kernel, and all members with their
calibrations. Forces and stresses are derivatives of the energy by torch. Members are deviations
from the prediction throughout, so that no digits are lost.
"""
# ruff: noqa: UP006, UP035, UP045 — metatomic compares these annotations, which cannot be strings

from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import torch
from ase.data import chemical_symbols
from metatensor.torch import Labels, TensorBlock, TensorMap
from metatomic.torch import (
    AtomisticModel,
    ModelCapabilities,
    ModelMetadata,
    ModelOutput,
    NeighborListOptions,
    System,
)

from qualms.arrays import Float64Array
from qualms.atomistic.baseline import TOLERANCE
from qualms.atomistic.fitted import Fitted
from qualms.atomistic.forces import KernelTerm, make_potential
from qualms.calibration.members import source_members
from qualms.calibration.methods import (
    NODES,
    Calibration,
    ShrinkageCalibration,
    SourcesCalibration,
    log_std_moments,
)
from qualms.calibration.vectors import QuantityCalibration
from qualms.features.soap_derivatives import ScaleFeatures

__all__ = ["save"]


class Environments(NamedTuple):
    """Environments of n atoms, and the p pairs of their centres with neighbours."""

    atoms: torch.Tensor  #: (n, 2): structure, and place in it, of each centre
    kinds: torch.Tensor  #: (n,): element of each centre
    i: torch.Tensor  #: (p,): the centre
    kinds_j: torch.Tensor  #: (p,): element of the neighbour
    vectors: torch.Tensor  #: (p, 3): from the centre to the neighbour


def selected(every: Environments, chosen: torch.Tensor) -> Environments:
    """Return the environments of some atoms (k, 2) of all."""
    n = len(every.atoms)
    number, numbers = chosen[:, 0] * n + chosen[:, 1], every.atoms[:, 0] * n + every.atoms[:, 1]
    is_chosen = torch.isin(numbers, number)
    place, used = torch.cumsum(is_chosen, 0) - 1, is_chosen.index_select(0, every.i)
    i, kinds_j, vectors = every.i[used], every.kinds_j[used], every.vectors[used]
    i = place.index_select(0, i)
    return Environments(every.atoms[is_chosen], every.kinds[is_chosen], i, kinds_j, vectors)


def sums(values: torch.Tensor, owner: torch.Tensor, n: int) -> torch.Tensor:
    """Return sums of rows (m, k) with the same owner (m,), of n: (n, k)."""
    total = torch.zeros(n, values.shape[1], dtype=values.dtype, device=values.device)
    return total.index_add(0, owner, values)


def _tensor(values: Any) -> Any:
    return torch.tensor(np.ascontiguousarray(values, dtype=np.float64))


# --- features of environments ---


class Harmonics(torch.nn.Module):  # type: ignore[misc]
    """Real spherical harmonics, by the recursion of `qualms.features.pair_core`."""

    def __init__(self, norms: Float64Array) -> None:
        super().__init__()
        self.l_max: int = len(norms) - 1
        self.register_buffer("norms", _tensor(norms[..., None]))

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """Return Y_lm ((l_max + 1)², p) of unit vectors (3, p)."""
        x, y, z = u[0], u[1], u[2]
        ones = torch.ones_like(u[:1])
        cosines, sines = [ones[0]], [torch.zeros_like(x)]
        for m in range(self.l_max):
            cosines.append(x * cosines[m] - y * sines[m])
            sines.append(x * sines[m] + y * cosines[m])
        Q, below, found = ones, ones, [self.norms[0, :1] * ones]
        for n in range(1, self.l_max + 1):
            M = torch.arange(n, device=u.device).unsqueeze(1)
            rows = (2 * n - 1) * z * Q
            if n > 1:
                rows = rows - torch.cat([(n - 1 + M[:-1]) * below, torch.zeros_like(ones)])
            below, Q = Q, torch.cat([rows / (n - M), (1 - 2 * n) * Q[n - 1 :]])
            scaled = self.norms[n, : n + 1] * Q
            of_sines = scaled * torch.stack(sines[: n + 1])
            found += [torch.flip(of_sines, [0])[:n], scaled * torch.stack(cosines[: n + 1])]
        return torch.cat(found)


class Features(torch.nn.Module):  # type: ignore[misc]
    """Power spectra of one scale, compressed and normalised as those of the model."""

    def __init__(self, features: ScaleFeatures) -> None:
        super().__init__()
        engine, radial = features.engine, features.engine.radial
        self.n_radial, self.lowest, self.step = radial.n_radial, radial.lowest, radial.step
        self.cutoff, self.width, self.scale, self.exponent, self.rate = radial.shape.tolist()
        # Cubic polynomials between the knots.
        (a, s), (b, e) = radial.table[:-1].swapaxes(0, 1), radial.table[1:].swapaxes(0, 1)
        cubic = np.stack([a, s, 3 * (b - a) - 2 * s - e, 2 * (a - b) + s + e], axis=1)
        self.register_buffer("cubic", _tensor(cubic))
        self.register_buffer("own", _tensor(radial.own))
        self.harmonics = Harmonics(radial.norms)
        self.orders: List[int] = [2 * order + 1 for order in range(radial.l_max + 1)]
        # Densities of elements are mixed to those of pseudo-species, or taken as they are.
        self.mixed: bool = engine.scale.pseudo_species is not None
        self.register_buffer("weights", _tensor(engine.weights))
        K = engine.weights.shape[1]
        pair = np.full((K, K), -1)
        pair[np.triu_indices(K)] = np.arange(K * (K + 1) // 2)
        self.register_buffer("pair", torch.tensor(pair))
        same = np.eye(K, dtype=bool)[np.triu_indices(K)]
        factors = np.where(same[:, None], engine.factors[0], engine.factors[1])
        factors = np.repeat(factors, radial.n_radial**2, axis=1)
        self.register_buffer("factors", _tensor(factors))
        self.compressed: bool = features.projection is not None
        projection = np.empty((0, 0, 0))
        if features.projection is not None:
            rows = features.projection.reshape(*factors.shape, -1)
            projection = factors[..., None] * rows
        self.register_buffer("projection", _tensor(projection))
        #: 0 for features that are normalised
        self.feature_scale: float = features.feature_scale or 0.0

    def radial(self, r: torch.Tensor) -> torch.Tensor:
        """Return R_nl at distances (p,): (p, (l_max + 1)·n_radial)."""
        t = r / self.step - self.lowest
        k = torch.clamp(t.detach().to(torch.int64), 0, len(self.cubic) - 1)
        t = (t - k).unsqueeze(1)
        a, s, second, third = self.cubic.index_select(0, k).unbind(1)
        fade = torch.ones_like(r)
        if self.width > 0:
            phase = torch.clamp((r - self.cutoff + self.width) / self.width, min=0.0)
            fade = 0.5 * (1 + torch.cos(torch.pi * phase))
        if self.rate > 0:
            fade = fade * self.rate / (self.rate + (r / self.scale) ** self.exponent)
        return (a + t * (s + t * (second + t * third))) * fade.unsqueeze(1)

    def densities(self, some: Environments, place: torch.Tensor, E: int) -> torch.Tensor:
        """Return c (n, (l_max + 1)², E, n_radial) of the E elements that have a place.

        Neighbours of one element around one atom are a row of an array, filled up with zeros, so
        that sums over them are products of matrices.
        """
        n, N, d = len(some.kinds), self.n_radial, some.vectors
        r = torch.sqrt((d * d).sum(dim=1))
        run = some.i * E + place.index_select(0, some.kinds_j)
        used = torch.nonzero(r < self.cutoff)[:, 0]
        used = used.index_select(0, torch.argsort(run.index_select(0, used)))
        run, r, d = run.index_select(0, used), r.index_select(0, used), d.index_select(0, used)
        counts = torch.bincount(run, minlength=n * E)
        width = int(counts.max()) if len(run) > 0 else 1
        column = torch.arange(len(run), device=d.device)
        column = column - (torch.cumsum(counts, 0) - counts).index_select(0, run)
        YR = torch.cat([self.harmonics((d / r.unsqueeze(1)).t()).t(), self.radial(r)], dim=1)
        rows = torch.zeros(n * E * width, YR.shape[1], dtype=d.dtype, device=d.device)
        rows = rows.index_copy(0, run * width + column, YR).reshape(n * E, width, YR.shape[1])
        alone = torch.zeros(n * E, 1, N, dtype=d.dtype, device=d.device)
        centre = torch.arange(n, device=d.device) * E + place.index_select(0, some.kinds)
        parts = [alone.index_fill(0, centre, 1.0) * self.own]
        columns = torch.split(rows, self.orders + [N] * len(self.orders), 2)
        for order in range(len(self.orders)):
            Y, R = columns[order], columns[len(self.orders) + order]
            parts.append(torch.bmm(Y.transpose(1, 2), R))
        parts[1] = parts[1] + parts[0]
        c = torch.cat(parts[1:], dim=1)
        return c.reshape(n, E, c.shape[1], N).transpose(1, 2)

    def forward(self, some: Environments) -> torch.Tensor:
        """Return x (n, q)."""
        n, N = len(some.kinds), self.n_radial
        every = torch.cat([some.kinds, some.kinds_j])
        is_present = torch.bincount(every, minlength=len(self.weights)) > 0
        present = torch.nonzero(is_present)[:, 0]
        c = self.densities(some, torch.cumsum(is_present, 0) - 1, len(present))
        # Pairs of species in these structures.
        if self.mixed:
            c = torch.einsum("ak,iqan->iqkn", self.weights.index_select(0, present), c)
            table = self.pair
        else:
            table = self.pair.index_select(0, present).index_select(1, present)
        K = len(table)
        place = torch.nonzero(table.reshape(-1) >= 0)[:, 0]
        which = table.reshape(-1)[place]
        spectra: List[torch.Tensor] = []
        for of_order in torch.split(c, self.orders, 1):
            rows = of_order.reshape(n, of_order.shape[1], K * N)
            P = torch.bmm(rows.transpose(1, 2), rows).reshape(n, K, N, K, N)
            spectra.append(P.transpose(2, 3).reshape(n, K * K, N * N).index_select(1, place))
        flat = torch.cat(spectra, dim=2)  # (n, pairs, products)
        if self.compressed:
            matrix = self.projection
            if len(which) < len(matrix):
                matrix = matrix.index_select(0, which)
            y = flat.flatten(1) @ matrix.flatten(0, 1)
        else:
            y = torch.zeros(n, len(self.factors), flat.shape[2], dtype=c.dtype, device=c.device)
            y = y.index_copy(1, which, flat * self.factors.index_select(0, which)).flatten(1)
        if self.feature_scale > 0:
            return y / self.feature_scale
        square = (y * y).sum(dim=1, keepdim=True)
        return y / torch.sqrt(torch.where(square > 0, square, torch.ones_like(square)))


class Term(torch.nn.Module):  # type: ignore[misc]
    """A term of the kernel: its prediction, and the deviations of R members from it.

    Column 0 of weights, and the first quadratic form, are those of the prediction.
    """

    def __init__(self, term: KernelTerm, exponent: float) -> None:
        super().__init__()
        self.features = Features(term.features)  # type: ignore[arg-type]
        self.exponent: float = exponent
        self.is_form: bool = term.forms is not None
        none = np.empty((0, 1, 1))
        X, W = (none[:, 0], none[:, 0]) if self.is_form else (term.representatives, term.weights)
        self.register_buffer("X", _tensor(X))
        self.register_buffer("W", _tensor(term.share * W))
        self.register_buffer("forms", _tensor(none if term.forms is None else term.forms))

    def kernel(self, x: torch.Tensor) -> torch.Tensor:
        """Return (x·X)^ζ, of which negative products are rounding: (n, M)."""
        products = x @ self.X.t()
        if self.exponent == 2.0:
            return products * products
        if self.exponent != round(self.exponent):
            products = torch.clamp(products, min=0.0)
        return products**self.exponent

    def energies(self, x: torch.Tensor) -> torch.Tensor:
        """Return the predictions of atoms (n,)."""
        if self.is_form:
            return ((x @ self.forms[0]) * x).sum(dim=1)
        return self.kernel(x) @ self.W[:, 0]

    def deviations(self, x: torch.Tensor) -> torch.Tensor:
        """Return those of atoms (n, R)."""
        if self.is_form:
            R, q = self.forms.shape[0] - 1, x.shape[1]
            y = (x @ self.forms[1:].reshape(R * q, q).t()).reshape(-1, R, q)
            return torch.bmm(y, x.unsqueeze(2))[:, :, 0]
        return self.kernel(x) @ self.W[:, 1:]

    def total_deviations(self, x: torch.Tensor, sizes: List[int]) -> torch.Tensor:
        """Return sums of those of consecutive atoms: (structures, R)."""
        sums: List[torch.Tensor] = []
        for part in torch.split(x, sizes):
            if self.is_form:  # tr F Σ xxᵀ
                forms = self.forms[1:]
                sums.append(forms.reshape(forms.shape[0], -1) @ (part.t() @ part).reshape(-1))
            else:
                sums.append(self.kernel(part).sum(dim=0) @ self.W[:, 1:])
        return torch.stack(sums)


# --- calibration ---


def spread(deviations: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation (…) of members (…, R); its derivative is zero at zero."""
    about = deviations - deviations.mean(dim=-1, keepdim=True)
    square = (about * about).sum(dim=-1) / (about.shape[-1] - 1)
    some = torch.where(square > 0, square, torch.ones_like(square))
    return torch.where(square > 0, torch.sqrt(some), torch.zeros_like(square))


class PowerStd(torch.nn.Module):  # type: ignore[misc]
    """σ² = a + b ŝ^2γ: `PowerCalibration`, and `StudentCalibration` with γ = 1."""

    def __init__(self, calibration: Calibration, n: int) -> None:
        super().__init__()
        at_zero, at_one = (calibration.std(np.array([0.0, 1.0]), n) ** 2).tolist()
        self.a, self.b, self.gamma = at_zero, at_one - at_zero, calibration.gamma

    def forward(self, s: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Return σ."""
        return torch.sqrt(self.a + self.b * torch.clamp(s, min=1e-150) ** (2 * self.gamma))


class ShrinkageStd(torch.nn.Module):  # type: ignore[misc]
    """σ of `ShrinkageCalibration`, by the same quadrature."""

    def __init__(self, calibration: ShrinkageCalibration, n: int) -> None:
        super().__init__()
        self.m, self.tau = calibration.log_std_mean, calibration.log_std_std
        self.nu, self.of_mean = n - 1.0, calibration.centre**2 / n
        self.log_alpha, self.gamma = float(np.log(calibration.alpha)), calibration.gamma
        self.register_buffer("nodes", _tensor(np.sinh(NODES)))
        self.register_buffer("log_step", _tensor(np.log(np.cosh(NODES))))

    def forward(self, s: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Return σ."""
        log_s = torch.log(torch.clamp(s, min=1e-300)).clamp(min=self.m - 3 * self.tau).unsqueeze(-1)
        precision = 2 * self.nu + self.tau**-2
        u = (2 * self.nu * log_s + self.m / self.tau**2) / precision + self.nodes * precision**-0.5
        ratio = 2 * (log_s - u)
        log_weight = 0.5 * self.nu * (ratio - torch.exp(ratio)) + self.log_step
        share = torch.softmax(log_weight - 0.5 * ((u - self.m) / self.tau) ** 2, dim=-1)
        v = torch.exp(2 * (self.log_alpha + self.gamma * u)) + self.of_mean * torch.exp(2 * u)
        return torch.sqrt((share * v).sum(dim=-1))


class SourcesStd(torch.nn.Module):  # type: ignore[misc]
    """σ of `SourcesCalibration` without novelty."""

    def __init__(self, calibration: SourcesCalibration, n: int, n_posterior: int) -> None:
        super().__init__()
        c = calibration
        self.of_s, self.of_p = c.alpha**2 + c.centre**2 / n, c.posterior**2
        self.floor, self.excess, self.onset = c.floor**2, c.excess**2, c.onset**2
        self.m, self.beta = c.log_std_mean, c.log_std_slope
        self.bias, self.v = map(float, log_std_moments(c.n_components * (n - 1)))
        self.bias_p, v_p = 0.0, 0.0
        if n_posterior:
            dof = c.n_components * (n_posterior - 1)
            self.bias_p, v_p = map(float, log_std_moments(dof))
        # Without others, all members are drawn from the posterior.
        self.is_alone: bool = not n_posterior and (c.posterior > 0 or c.excess > 0)
        self.has_p: bool = n_posterior > 0 or self.is_alone
        tau2 = c.log_std_std**2 + self.beta**2 * v_p
        self.share: float = tau2 / (tau2 + self.v)

    def forward(self, s: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Return σ."""
        if self.is_alone:
            p = s
        log_s = torch.log(torch.clamp(s, min=1e-300)) - self.bias
        log_p = torch.zeros_like(p)
        if self.has_p:
            log_p = torch.log(torch.clamp(p, min=1e-300)) - self.bias_p
        prior = self.m + self.beta * log_p
        log_square = self.share * log_s + (1 - self.share) * prior + self.share * self.v
        extrapolated = torch.clamp(p * p - self.onset, min=0.0)
        square = self.of_s * torch.exp(2 * log_square) + self.floor
        square = square + self.of_p * p * p + self.excess * extrapolated
        return torch.sqrt(torch.clamp(square, min=1e-300))


class Calibrated(torch.nn.Module):  # type: ignore[misc]
    """Calibration of deviations of R members from the prediction: `calibrated_members`."""

    def __init__(self, calibration: Calibration, isotropy: float, n_members: int) -> None:
        super().__init__()
        n = calibration.n_subsampled or n_members
        self.n: int = n
        self.has_posterior: bool = n_members > n
        #: Deviations are linear in those of the members before.
        sources = source_members(calibration, np.eye(n_members))
        self.register_buffer("sources", _tensor(sources - sources.mean(axis=1, keepdims=True)))
        N = sources.shape[1]
        direction = np.arange(N) - (N - 1) / 2
        self.register_buffer("direction", _tensor(direction / direction.std(ddof=1)))
        self.isotropy: float = isotropy
        if isinstance(calibration, SourcesCalibration):
            self.std = SourcesStd(calibration, n, n_members - n)
        elif isinstance(calibration, ShrinkageCalibration):
            self.std = ShrinkageStd(calibration, n)
        else:
            self.std = PowerStd(calibration, n)

    def forward(self, deviations: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return calibrated deviations (…, N) and their factors (…), one where all are zero."""
        own = deviations @ self.sources
        width = spread(own)
        s = spread(deviations[..., : self.n])
        p = spread(deviations[..., self.n :]) if self.has_posterior else torch.zeros_like(s)
        sigma = self.std(s, p)
        factors = torch.where(width > 0, sigma, 1.0) / torch.where(width > 0, width, 1.0)
        # Members that agree may be wrong, in any direction.
        alike = sigma.unsqueeze(-1) * self.direction
        agree = (width == 0).unsqueeze(-1)
        return torch.where(agree, alike, own * factors.unsqueeze(-1)), factors

    def vector_std(self, deviations: torch.Tensor) -> torch.Tensor:
        """Return the standard deviations (n, 3) of components of vectors (n, 3, R)."""
        s = spread(deviations[..., : self.n])
        p = spread(deviations[..., self.n :]) if self.has_posterior else torch.zeros_like(s)
        own = deviations @ self.sources
        covariance = own @ own.transpose(1, 2) / (own.shape[2] - 1)
        square = torch.diagonal(covariance, dim1=1, dim2=2).mean(dim=1)
        s, p = torch.sqrt((s * s).mean(dim=1)), torch.sqrt((p * p).mean(dim=1))
        scale = self.std(s, p) ** 2 / torch.where(square > 0, square, 1.0)
        covariance = covariance * torch.where(square > 0, scale, 1.0).reshape(-1, 1, 1)
        if self.isotropy > 0:  # `shrink_towards_sphere`
            variances, axes = torch.linalg.eigh(covariance)
            variances = torch.clamp(variances, min=0.0)
            mean = variances.mean(dim=1, keepdim=True) + 1e-300
            sphere = variances / (variances + 0.01 * mean)
            sphere = sphere / (sphere.mean(dim=1, keepdim=True) + 1e-300)
            target = (1 - self.isotropy) * variances + self.isotropy * mean * sphere
            covariance = (axes * target.unsqueeze(1)) @ axes.transpose(1, 2)
        return torch.sqrt(torch.clamp(torch.diagonal(covariance, dim1=1, dim2=2), min=0.0))


# --- the model ---


class Potential(torch.nn.Module):  # type: ignore[misc]
    """Energies with members and standard deviations, and standard deviations of forces."""

    def __init__(self, fitted: Fitted) -> None:
        super().__init__()
        n_members, species = fitted.weights.shape[1], fitted.baseline.species
        mean = source_members(fitted.calibration, np.eye(n_members)).mean(axis=1, keepdims=True)
        combinations = np.hstack([mean, np.eye(n_members) - mean])
        exponent = fitted.representation.settings.exponent  # type: ignore[attr-defined]
        self.terms = torch.nn.ModuleList(
            Term(term.combined(combinations), exponent)
            for term in make_potential(fitted, fitted.weights)
        )
        baselines = fitted.baseline.members + fitted.intercepts
        self.register_buffer("baselines", _tensor(baselines @ combinations))
        self.energy = Calibrated(fitted.calibration, 0.0, n_members)
        of_forces = fitted.calibrations.get("forces", QuantityCalibration(fitted.calibration))
        calibration = fitted.calibration_of("forces") or fitted.calibration
        self.has_forces: bool = "forces" in fitted.calibrations
        self.forces = Calibrated(calibration, of_forces.isotropy, n_members)
        symbols = [chemical_symbols[z] for z in species]
        factors = [of_forces.elements.get(symbol, 1.0) for symbol in symbols]
        self.register_buffer("factors", _tensor(factors))
        kinds = np.full(max(species) + 1, -1)
        kinds[list(species)] = np.arange(len(species))
        self.register_buffer("kinds", torch.tensor(kinds))
        # The part of a composition whose energy the training set does not determine.
        span = fitted.baseline.span
        self.register_buffer("outside", _tensor(np.eye(len(species)) - span.T @ span))
        self.tolerance: float = TOLERANCE
        cutoff = fitted.representation.cutoff
        self.options = NeighborListOptions(cutoff=cutoff, full_list=True, strict=True)

    def requested_neighbor_lists(self) -> List[NeighborListOptions]:
        """Return the list that `forward` needs."""
        return [self.options]

    def read(self, systems: List[System]) -> Tuple[Environments, torch.Tensor]:
        """Return all environments, and the neighbour of each pair (p,)."""
        types: List[torch.Tensor] = []
        atoms: List[torch.Tensor] = []
        pairs: List[torch.Tensor] = []
        vectors: List[torch.Tensor] = []
        first = 0
        for s, system in enumerate(systems):
            found = system.get_neighbor_list(self.options)
            atom = torch.arange(len(system), device=system.positions.device)
            types.append(system.types)
            atoms.append(torch.stack([torch.full_like(atom, s), atom], dim=1))
            pairs.append(found.samples.values[:, :2].to(torch.int64) + first)
            vectors.append(found.values[:, :, 0])
            first += len(system)
        kinds = self.kinds.index_select(0, torch.cat(types).to(torch.int64))
        i, j = torch.cat(pairs).unbind(1)
        every = Environments(
            torch.cat(atoms), kinds, i, kinds.index_select(0, j), torch.cat(vectors)
        )
        return every, j

    def check(self, every: Environments, n: int) -> None:
        """Reject compositions, of n structures, whose energy is not known."""
        E = len(self.outside)
        counts = torch.bincount(every.atoms[:, 0] * E + every.kinds, minlength=n * E).reshape(n, E)
        shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1).to(torch.float64)
        if bool(((shares @ self.outside).abs() > self.tolerance).any()):
            raise ValueError(
                "the energy of this composition is not a combination of those of the training set"
            )

    def force_std(
        self, every: Environments, j: torch.Tensor, factors: torch.Tensor
    ) -> torch.Tensor:
        """Return the standard deviations of forces (n, 3): a derivative of each member.

        Given the factors (n,) of the energies of members, for a model without forces.
        """
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        d = every.vectors.detach().clone().requires_grad_(True)
        moved = Environments(every.atoms, every.kinds, every.i, every.kinds_j, d)
        members = torch.zeros(self.baselines.shape[1] - 1, dtype=d.dtype, device=d.device)
        for term in self.terms:
            x = term.features(moved)
            members = members + term.total_deviations(x, [len(x)])[0]
        columns: List[torch.Tensor] = []
        for k in range(len(members)):
            slopes = torch.autograd.grad([members[k]], [d], retain_graph=True)[0]
            assert slopes is not None
            n = len(every.kinds)
            columns.append(sums(slopes, every.i, n) - sums(slopes, j, n))
        torch.set_grad_enabled(before)
        forces = torch.stack(columns, dim=2)
        if self.has_forces:
            of_elements = self.factors.index_select(0, every.kinds)
            return self.forces.vector_std(forces) * of_elements.unsqueeze(1)
        return spread(forces @ self.energy.sources) * factors.unsqueeze(1)

    def forward(
        self,
        systems: List[System],
        outputs: Dict[str, ModelOutput],
        selected_atoms: Optional[Labels] = None,
    ) -> Dict[str, TensorMap]:
        """Return the outputs of structures, or of some of their atoms: see `save`."""
        n, (every, j), some = len(systems), self.read(systems), selected_atoms
        used = every
        if some is None:
            self.check(every, n)
        else:
            used = selected(every, some.values.to(torch.int64))
        owner = used.atoms[:, 0]
        n_atoms: List[int] = torch.bincount(owner, minlength=n).tolist()
        size = torch.bincount(owner, minlength=n).clamp(min=1).to(torch.float64).unsqueeze(1)
        has_members, of_each = False, False
        for name, output in outputs.items():
            has_members = has_members or name != "energy"
            of_each = of_each or (name.startswith("energy_") and output.sample_kind == "atom")
        baselines = self.baselines.index_select(0, used.kinds)
        energies, members = baselines[:, 0], baselines[:, 1:]
        totals = sums(members, owner, n)
        for term in self.terms:
            x = term.features(used)
            energies = energies + term.energies(x)
            if of_each:
                members = members + term.deviations(x)
            elif has_members:
                totals = totals + term.total_deviations(x, n_atoms)
        if of_each:
            totals = sums(members, owner, n)
        deviations, factors = totals, size[:, 0]
        if has_members:
            deviations, factors = self.energy(totals / size)
            deviations, factors = deviations * size, factors.index_select(0, owner)
        total = sums(energies.unsqueeze(1), owner, n)
        for system in systems:  # atoms without neighbours have forces, too
            total = total + 0.0 * system.positions.sum()
        number = torch.arange(n, device=size.device).unsqueeze(1)
        axes = Labels(["xyz"], torch.arange(3, device=size.device).unsqueeze(1))
        results: Dict[str, TensorMap] = {}
        for name, output in outputs.items():
            samples, values, own = Labels(["system"], number), total, deviations
            components, column = [axes][:0], "energy"
            if output.sample_kind == "atom":
                samples, values = Labels(["system", "atom"], used.atoms), energies.unsqueeze(1)
            if output.sample_kind == "atom" and of_each:
                own = (members @ self.energy.sources) * factors.unsqueeze(1)
            if name == "energy_ensemble":
                values = values + own
            elif name == "energy_uncertainty":
                values = spread(own).unsqueeze(1)
            elif name == "qualms::forces_uncertainty":
                if some is not None or output.sample_kind != "atom":
                    raise ValueError("uncertainties of forces are those of all atoms")
                values, components = self.force_std(every, j, factors).unsqueeze(2), [axes]
                column = "forces_uncertainty"
            columns = torch.arange(values.shape[-1], device=size.device).unsqueeze(1)
            block = TensorBlock(values, samples, components, Labels([column], columns))
            results[name] = TensorMap(Labels(["_"], number[:1] * 0), [block])
        return results


def save(fitted: Fitted, path: Path, description: str) -> None:
    """Write the model of metatomic.

    Its outputs, in eV and eV/Å, are ``energy``, ``energy_ensemble`` and ``energy_uncertainty`` of
    structures or of atoms, as in `AtomisticModel.predict`, and ``qualms::forces_uncertainty``. Of
    atoms that are selected, members are calibrated as if these were all.

    Parameters
    ----------
    fitted : Fitted
        Of SOAP by featomic, without novelty as a source of variance.
    path : Path
    description : str
    """
    outputs = {
        name: ModelOutput(unit="eV", sample_kind="atom")
        for name in ("energy", "energy_ensemble", "energy_uncertainty")
    }
    outputs["qualms::forces_uncertainty"] = ModelOutput(unit="eV/A", sample_kind="atom")
    capabilities = ModelCapabilities(
        outputs=outputs,
        atomic_types=list(fitted.baseline.species),
        interaction_range=fitted.representation.cutoff,
        length_unit="angstrom",
        supported_devices=["cpu", "cuda"],
        dtype="float64",
    )
    metadata = ModelMetadata(name="qualms", description=description)
    AtomisticModel(Potential(fitted).eval(), metadata, capabilities).save(path)
