"""From labelled structures to a trained model, one stage after the other."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from ase.neighborlist import neighbor_list

from qualms.atomistic.basis import Basis
from qualms.atomistic.checkpoint import Checkpoint
from qualms.atomistic.feature_stage import FeatureStage, Resources
from qualms.atomistic.force_rows import fill_rows, scale_rows
from qualms.atomistic.plan import Plan, make_plan
from qualms.atomistic.progress import Stages
from qualms.atomistic.representation import Representation, resolve_compression
from qualms.atomistic.selection import select_representatives
from qualms.atomistic.settings import Settings
from qualms.atomistic.solving import KernelRows, Outcome, Solver, check_members
from qualms.atomistic.training_set import TrainingSet
from qualms.core.kernels import unit_scale
from qualms.core.linalg import Whitening, whiten
from qualms.core.selection import RowSource
from qualms.core.typing import Float64Array, FloatArray, IntArray
from qualms.errors import QualmsWarning

#: Share of the training structures that would not look like extrapolation if they were new.
_NOT_NOVEL = 0.99
#: Kernel rows are float32, or with forces float64: see `qualms.core.linalg.whiten`.
_RTOL, _RTOL_OF_FORCES = 1e-6, 1e-10
#: Structures whose neighbours are counted for the plan.
_SAMPLED = 10


class Training:
    """The stages of a training run; `run` goes through them in order.

    Parameters
    ----------
    data : TrainingSet
    settings : Settings
    resources : Resources
    stages : Stages
    """

    def __init__(
        self, data: TrainingSet, settings: Settings, resources: Resources, stages: Stages
    ) -> None:
        self.data = data
        self.settings = settings
        self.resources = resources
        self.stages = stages
        self.features = FeatureStage(data, resources, stages)
        check_members(data, settings)
        self.compression = resolve_compression(
            settings.representation,
            data.species,
            data.n_environments,
            min(settings.n_representatives, data.n_environments),
            derivatives=settings.has_forces,
        )
        self.plan = self._make_plan()
        self.features.n_workers = self.plan.n_workers

    def run(self) -> Outcome:
        """Train."""
        return self.prepare().solve(self.settings, np.random.default_rng(self.settings.seed))

    def prepare(self) -> Solver:
        """Compute everything that members of any size share."""
        return Solver(self.data, self.settings, self.kernel_rows(), self.plan, self.stages)

    def kernel_rows(self) -> KernelRows:
        """Compute features, choose representatives, and compute kernel rows."""
        with ExitStack() as stack:
            representation = self.features.representation(
                self.settings.representation, self.compression, self._rng(1)
            )
            candidates = self._candidates(representation, stack)
            features = None if self.plan.mode == "recompute" else candidates.features
            chosen = self._representatives(representation, candidates)
            whitening, representatives, chosen = self._whitened(
                representation, candidates.features[chosen], chosen
            )
            candidates_rows = candidates.rows
            origins = self._origins(candidates_rows[chosen])
            del candidates
            basis, K, novelty = self._kernel_rows(
                representation,
                representatives,
                self._own(candidates_rows[chosen]),
                features,
            )
            del features  # before the largest matrices of all are made
        return KernelRows(representation, basis, origins, whitening, K, novelty)

    def _rng(self, purpose: int) -> np.random.Generator:
        """Return a generator of its own for each purpose: a resumed run leaves out stages."""
        return np.random.default_rng([self.settings.seed, purpose])

    # -- what there is to do ----------------------------------------------------------------------

    def _make_plan(self) -> Plan:
        widths = Representation(self.settings.representation, tuple(self.data.species)).widths
        most = max(widths) if self.compression is None else self.compression.n_features
        kept = [min(w, most) for w in widths]
        maps = [] if self.compression is None else zip(widths, kept, strict=True)
        checkpoint = self.resources.checkpoint
        return make_plan(
            n_rows=self.data.n_rows,
            n_environments=self.data.n_environments,
            n_features=sum(kept),
            n_raw_features=sum(widths),
            n_scales=len(widths),
            n_representatives=min(self.settings.n_representatives, self.data.n_environments),
            n_members=self.settings.n_members,
            n_workers=self.resources.threads,
            memory=self.resources.memory,
            directory=None if checkpoint is None else checkpoint.directory,
            n_structures=len(self.data.frames),
            selection=self.settings.selection,
            keep_pp=self.settings.keep_pp,
            to_disk=checkpoint is not None,
            n_pairs=self._n_pairs() if self.settings.mechanical else 0,
            n_projection=sum(width * q for width, q in maps),
        )

    def _n_pairs(self) -> int:
        """Estimate the number of neighbours of all environments, from a few structures."""
        frames = self.data.frames[:: max(1, len(self.data.frames) // _SAMPLED)]
        found = 0
        for scale in self.settings.representation.scales:
            for atoms in frames:
                found += len(neighbor_list("i", atoms, scale.cutoff))  # type: ignore[no-untyped-call]
        return int(found / sum(map(len, frames)) * self.data.n_environments)

    # -- representatives --------------------------------------------------------------------------

    def _candidates(self, representation: Representation, stack: ExitStack) -> _Candidates:
        """Return all environments, or, if features are computed twice, as many as fit."""
        if self.plan.mode != "recompute":
            features = self.features.everything(representation, self.plan.mode, stack)
            return _Candidates(features, np.arange(self.data.n_environments))
        picked = self._pool()
        rows = [np.arange(*self.data.offsets[s : s + 2]) for s in picked]
        return _Candidates(self.features.some(representation, picked), np.concatenate(rows))

    def _pool(self) -> IntArray:
        """Return random structures whose environments fit; or those of a choice made before."""
        checkpoint = self.resources.checkpoint
        if checkpoint is not None and checkpoint.has("selection"):
            return np.unique(self._structures(_chosen_before(checkpoint)))
        order = self._rng(2).permutation(len(self.data.frames))
        fits = np.cumsum(np.diff(self.data.offsets)[order]) <= self.plan.n_candidates
        fits[0] = True
        return np.sort(order[fits])

    def _representatives(self, representation: Representation, candidates: _Candidates) -> IntArray:
        checkpoint = self.resources.checkpoint
        if checkpoint is not None and checkpoint.has("selection"):
            return np.searchsorted(candidates.rows, _chosen_before(checkpoint))
        with self.stages.stage("Representatives", self.plan.n_representatives) as advance:
            chosen = select_representatives(
                candidates.features,
                representation.kernel,
                self.data.center_species[candidates.rows],
                self.settings,
                self._rng(3),
                advance,
            )
        if checkpoint is not None:
            checkpoint.save("selection", {"environments": candidates.rows[chosen]})
        return chosen

    def _whitened(
        self, representation: Representation, representatives: FloatArray, chosen: IntArray
    ) -> tuple[Whitening, FloatArray, IntArray]:
        with self.stages.stage("Whitening"):
            exact = representatives.astype(np.float64)
            rtol = _RTOL_OF_FORCES if self.settings.mechanical else _RTOL
            whitening = whiten(np.asarray(representation.kernel(exact, exact)), rtol=rtol)
        if whitening.negative > 1e-5:
            warnings.warn(
                "The kernel is not positive semi-definite; what is negative was dropped. "
                "(Use an integer exponent.)",
                QualmsWarning,
                stacklevel=4,
            )
        kept = whitening.pivots
        return whitening, np.ascontiguousarray(representatives[kept]), chosen[kept]

    def _structures(self, environments: IntArray) -> IntArray:
        """Return the structure of each of some environments."""
        return np.searchsorted(self.data.offsets, environments, side="right") - 1

    def _origins(self, environments: IntArray) -> IntArray:
        """Return structure, as given to ``fit``, and atom of some environments: (r, 2)."""
        structure = self._structures(environments)
        place = environments - self.data.offsets[structure]
        atom = [self.data.centers[s][p] for s, p in zip(structure, place, strict=True)]
        return np.stack([self.data.source[structure], np.array(atom)], axis=1).astype(np.int64)

    def _own(self, environments: IntArray) -> list[IntArray]:
        """Return the representatives that come from each structure, or from its group."""
        structure = self._structures(environments)
        groups = self.data.groups[structure]
        order = np.argsort(groups, kind="stable")
        sizes = np.bincount(groups, minlength=int(self.data.groups.max()) + 1)
        by_group = np.split(order, np.cumsum(sizes)[:-1])
        return [by_group[g] for g in self.data.groups]

    # -- kernel rows ------------------------------------------------------------------------------

    def _kernel_rows(
        self,
        representation: Representation,
        representatives: FloatArray,
        own: list[IntArray],
        features: RowSource | None,
    ) -> tuple[Basis, Float64Array, tuple[float, float]]:
        """Return the scaled basis, K_NM, and novelties that few training structures exceed."""
        plain = Basis(representation.kernel, representatives, 1.0, self.settings.per_atom)
        K = np.zeros((self.data.n_rows, len(representatives)))
        diagonal = np.empty(len(self.data.y))
        novelty = np.empty((len(own), 2))
        structure = row = done = 0
        with self.stages.stage("Kernel rows", self.data.n_environments) as advance:
            for block, offsets in self.features.blocks(representation, features):
                here = slice(structure, structure + len(offsets) - 1)
                rows = plain.rows(block, offsets, novelty=novelty[here], own=own[here])
                K[row : row + len(rows)] = rows
                diagonal[row : row + len(rows)] = plain.prior_variance(block, offsets)
                structure, row, done = here.stop, row + len(rows), done + len(block)
                advance(done)
        if self.data.mechanics is not None:
            self._derivative_rows(K, representation, representatives)
        scale = unit_scale(1.0, diagonal)
        K *= scale
        strangest, mean = np.quantile(novelty, _NOT_NOVEL, axis=0).tolist()
        return replace(plain, scale=scale), K, (strangest, mean)

    def _derivative_rows(
        self, K: Float64Array, representation: Representation, representatives: FloatArray
    ) -> None:
        """Fill in the rows of forces and virials, and those of energies anew, in float64."""
        n, labels = len(self.data.y), self.data.mechanics
        assert labels is not None
        with self.stages.stage("Rows of forces", self.data.n_environments) as advance:
            fill_rows(
                K[:n],
                K[n:],
                self.data.frames,
                labels,
                scale_rows(representation, representatives),
                advance,
            )


@dataclass(frozen=True)
class _Candidates:
    """RowSource of environments among which representatives are chosen, and which they are.

    Environments are counted through all structures; `rows` is increasing.
    """

    features: RowSource
    rows: IntArray


def _chosen_before(checkpoint: Checkpoint) -> IntArray:
    """Return the representatives that an interrupted run had chosen."""
    environments: IntArray = checkpoint.load("selection")[0]["environments"]
    return environments
