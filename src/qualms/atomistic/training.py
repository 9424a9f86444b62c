"""From labelled structures to a trained model, one stage after the other."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qualms.atomistic.basis import Basis
from qualms.atomistic.checkpoint import Checkpoint
from qualms.atomistic.compression import Projection
from qualms.atomistic.environments import (
    BLOCK,
    Features,
    KeptFeatures,
    SpilledFeatures,
    structure_blocks,
)
from qualms.atomistic.featurize import stop_workers, stream_features
from qualms.atomistic.plan import Plan, make_plan
from qualms.atomistic.progress import Stages
from qualms.atomistic.representation import (
    Representation,
    fit_representation,
    resolve_compression,
)
from qualms.atomistic.selection import select_representatives
from qualms.atomistic.settings import Settings
from qualms.atomistic.solving import KernelRows, Outcome, Solver, check_members
from qualms.atomistic.training_set import TrainingSet
from qualms.core.kernels import unit_scale
from qualms.core.linalg import Whitening, whiten
from qualms.core.typing import Float64Array, FloatArray, IntArray
from qualms.errors import InputError, QualmsWarning

#: Environments from which a compression is found: a quarter of them, but so many.
_SAMPLE = (5_000, 20_000)
#: Share of the training structures that would not look like extrapolation if they were new.
_NOT_NOVEL = 0.99
#: Kernel rows are float32: see `qualms.core.linalg.whiten`.
_RTOL = 1e-6


@dataclass(frozen=True)
class Resources:
    """What a run may use.

    Attributes
    ----------
    threads : int
    memory : str, float, optional
        Limit, such as ``"8GB"``.
    checkpoint : Checkpoint, optional
    """

    threads: int = 1
    memory: str | float | None = None
    checkpoint: Checkpoint | None = None


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
        check_members(data, settings)
        self.compression = resolve_compression(
            settings.representation,
            data.species,
            data.n_environments,
            min(settings.n_representatives, data.n_environments),
        )
        self.plan = self._make_plan()

    def run(self) -> Outcome:
        """Train."""
        return self.prepare().solve(self.settings, np.random.default_rng(self.settings.seed))

    def prepare(self) -> Solver:
        """Compute everything that members of any size share."""
        with ExitStack() as stack:
            representation = self._representation()
            features = self._features(representation, stack)
            candidates = features if features is not None else self._candidates(representation)
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
                None if features is None else features.features,
            )
            del features  # before the largest matrices of all are made
        rows = KernelRows(representation, basis, origins, whitening, K, novelty)
        del K
        return Solver(self.data, self.settings, rows, self.plan, self.stages)

    def _rng(self, purpose: int) -> np.random.Generator:
        """Return a generator of its own for each purpose: a resumed run leaves out stages."""
        return np.random.default_rng([self.settings.seed, purpose])

    # -- what there is to do ----------------------------------------------------------------------

    def _make_plan(self) -> Plan:
        widths = Representation(self.settings.representation, tuple(self.data.species)).widths
        most = max(widths) if self.compression is None else self.compression.n_features
        kept = [min(w, most) for w in widths]
        checkpoint = self.resources.checkpoint
        return make_plan(
            n_rows=len(self.data.y),
            n_environments=self.data.n_environments,
            n_features=sum(kept),
            n_raw_features=sum(widths),
            n_representatives=min(self.settings.n_representatives, self.data.n_environments),
            n_members=self.settings.n_members,
            n_workers=self.resources.threads,
            memory=self.resources.memory,
            directory=None if checkpoint is None else checkpoint.directory,
            keep_pp=self.settings.keep_pp,
            to_disk=checkpoint is not None,
        )

    # -- features ---------------------------------------------------------------------------------

    def _representation(self) -> Representation:
        soap, species = self.settings.representation, tuple(self.data.species)
        checkpoint = self.resources.checkpoint
        if checkpoint is not None and checkpoint.has("representation"):
            tensors, values = checkpoint.load("representation")
            errors = values["kernel_errors"]
            projections = tuple(Projection(tensors[str(s)], e) for s, e in enumerate(errors))
            return Representation(soap, species, projections, values["feature_scale"])
        if self.compression is None and soap.normalize:
            return Representation(soap, species)
        with self.stages.stage("Compression"):
            frames, centers = self._sample()
            representation = fit_representation(soap, species, frames, centers, self.compression)
        if checkpoint is not None:
            checkpoint.save(
                "representation",
                {str(s): p.matrix for s, p in enumerate(representation.projections)},
                {
                    "kernel_errors": [p.kernel_error for p in representation.projections],
                    "feature_scale": representation.feature_scale,
                },
            )
        return representation

    def _sample(self) -> tuple[list[Any], list[IntArray]]:
        """Structures, in random order, with enough environments to find a compression from."""
        order = self._rng(1).permutation(len(self.data.frames))
        sizes = np.diff(self.data.offsets)[order]
        wanted = int(np.clip(self.data.n_environments // 4, *_SAMPLE))
        enough = int(np.searchsorted(np.cumsum(sizes), wanted)) + 1
        picked = order[:enough]
        return [self.data.frames[i] for i in picked], [self.data.centers[i] for i in picked]

    def _features(self, representation: Representation, stack: ExitStack) -> _Candidates | None:
        """Return the features of all environments, unless they are to be computed twice."""
        if self.plan.mode == "recompute":
            return None
        n, d = self.data.n_environments, representation.n_features
        checkpoint = self.resources.checkpoint
        features: KeptFeatures | SpilledFeatures
        if self.plan.mode == "keep":
            features = KeptFeatures(n, d)
        else:
            directory = (
                checkpoint.directory
                if checkpoint is not None
                else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qualms-")))
            )
            features = SpilledFeatures(directory / "features", n, d)
            stack.callback(features.close)
        if checkpoint is not None and checkpoint.has("features"):
            self._reload(features, checkpoint)
        else:
            self._compute(features, representation)
            if checkpoint is not None:
                _store(features, checkpoint)
        return _Candidates(features, np.arange(n))

    def _compute(self, features: Features, representation: Representation) -> None:
        with self.stages.stage("Power spectra", self.data.n_environments) as advance:
            done = 0
            for batch in self._stream(representation):
                features.append(batch.features)
                done += len(batch.features)
                advance(done)
        stop_workers()

    def _stream(self, representation: Representation) -> Iterator[Any]:
        structures = zip(self.data.frames, self.data.centers, strict=True)
        return stream_features(representation, structures, n_workers=self.resources.threads)

    def _reload(self, features: KeptFeatures | SpilledFeatures, checkpoint: Checkpoint) -> None:
        n, d = features.shape
        path = checkpoint.path("features")
        if not path.exists() or path.stat().st_size != 4 * n * d:
            raise InputError(
                "resume", str(path), f"a file of {4 * n * d} bytes", "Run without --resume."
            )
        if isinstance(features, KeptFeatures):
            with self.stages.stage("Reading features", n) as advance:
                stored = SpilledFeatures(path, n, d)
                for begin in range(0, n, BLOCK):
                    features.append(stored[begin : begin + BLOCK])
                    advance(min(begin + BLOCK, n))
                stored.close()

    def _candidates(self, representation: Representation) -> _Candidates:
        """Compute the features of as many environments, of random structures, as fit."""
        picked = self._pool()
        rows = [np.arange(*self.data.offsets[s : s + 2]) for s in picked]
        features = KeptFeatures(sum(map(len, rows)), representation.n_features)
        structures = ((self.data.frames[s], self.data.centers[s]) for s in picked)
        with self.stages.stage("Power spectra of candidates", len(features)) as advance:
            done = 0
            for batch in stream_features(
                representation, structures, n_workers=self.resources.threads
            ):
                features.append(batch.features)
                done += len(batch.features)
                advance(done)
        return _Candidates(features, np.concatenate(rows))

    def _pool(self) -> IntArray:
        """Return random structures whose environments fit; or those of a choice made before."""
        checkpoint = self.resources.checkpoint
        if checkpoint is not None and checkpoint.has("selection"):
            return np.unique(self._structures(_chosen_before(checkpoint)))
        order = self._rng(2).permutation(len(self.data.frames))
        fits = np.cumsum(np.diff(self.data.offsets)[order]) <= self.plan.n_candidates
        return np.sort(order[fits])

    # -- representatives --------------------------------------------------------------------------

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
            whitening = whiten(np.asarray(representation.kernel(exact, exact)), rtol=_RTOL)
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
        features: Features | None,
    ) -> tuple[Basis, Float64Array, float]:
        """Return the scaled basis, K_NM, and a novelty that few training structures exceed."""
        per_atom = self.settings.kind == "atomic"
        plain = Basis(representation.kernel, representatives, 1.0, per_atom)
        n = len(self.data.y)
        K = np.empty((n, len(representatives)))
        diagonal = np.empty(n)
        novelty = np.empty(len(own))
        structure = row = done = 0
        with self.stages.stage("Kernel rows", self.data.n_environments) as advance:
            for block, offsets in self._blocks(representation, features):
                here = slice(structure, structure + len(offsets) - 1)
                rows = plain.rows(block, offsets, novelty=novelty[here], own=own[here])
                K[row : row + len(rows)] = rows
                diagonal[row : row + len(rows)] = plain.prior_variance(block, offsets)
                structure, row, done = here.stop, row + len(rows), done + len(block)
                advance(done)
        scale = unit_scale(1.0, diagonal)
        K *= scale
        return replace(plain, scale=scale), K, float(np.quantile(novelty, _NOT_NOVEL))

    def _blocks(
        self, representation: Representation, features: Features | None
    ) -> Iterator[tuple[FloatArray, IntArray]]:
        """Yield features of consecutive structures, and where each structure begins."""
        offsets = self.data.offsets
        if features is None:
            for batch in self._stream(representation):
                yield batch.features, batch.offsets
            return
        for first, last in structure_blocks(offsets):
            block = features[int(offsets[first]) : int(offsets[last])]
            yield block, offsets[first : last + 1] - offsets[first]


@dataclass(frozen=True)
class _Candidates:
    """Features of environments among which representatives are chosen, and which they are.

    Environments are counted through all structures; `rows` is increasing.
    """

    features: Features
    rows: IntArray


def _chosen_before(checkpoint: Checkpoint) -> IntArray:
    """Return the representatives that an interrupted run had chosen."""
    environments: IntArray = checkpoint.load("selection")[0]["environments"]
    return environments


def _store(features: KeptFeatures | SpilledFeatures, checkpoint: Checkpoint) -> None:
    if isinstance(features, SpilledFeatures):
        features.flush()
    else:
        n, d = features.shape
        with_file = SpilledFeatures(checkpoint.path("features"), n, d)
        for begin in range(0, n, BLOCK):
            with_file.append(features[begin : begin + BLOCK])
        with_file.flush()
        with_file.close()
    checkpoint.complete("features")
