"""Energies in float64, the same as come with forces, at the price of energies.

`AtomisticModel.predict` computes features in float32, which is fast, and rounds by less than any
model errs: by 1e-5 eV per atom, say, and up to 1e-3 eV if the data are so free of noise that
weights are large. But energies of two nearby structures that an optimiser or a finite difference
compares must differ by the work of the forces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ase import Atoms

from qualms.atomistic.gradients import batches
from qualms.atomistic.mechanics import check_frames, member_energies
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.threads import limited
from qualms.prediction import Prediction

#: Environments whose features are in memory at once.
_BATCH = 1024


def exact_energies(model: AtomisticModel, frames: Sequence[Atoms]) -> Prediction:
    """Predict energies as `AtomisticModel.predict_forces` does, without the forces.

    Parameters
    ----------
    model : AtomisticModel
        With features by featomic, of an extensive target.
    frames : sequence of Atoms
    """
    fitted, potential = model.fitted, model.potential
    check_frames(fitted, frames, stress=False)
    energies = np.zeros((len(frames), potential.n_columns))
    with limited(model.threads, sum(map(len, frames))):
        for batch in batches(frames, _BATCH):
            owners = batch.structures[batch.owners]
            for scale in potential.scales:
                engine = scale.scale.engine
                cut = batch.cut_out(engine.scale.cutoff)
                given = ([one.atoms for one in cut], [one.centers for one in cut])
                (piece,) = engine.pieces(*given, dtype=np.float64)
                np.add.at(energies, owners, scale.energies(np.asarray(piece.values, np.float64)))
    per_atom = Prediction(member_energies(fitted, frames, energies))
    sizes = np.array([len(atoms) for atoms in frames])
    energies_of_structures: Prediction = per_atom.calibrated(fitted.calibration) * sizes
    return energies_of_structures
