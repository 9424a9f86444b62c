"""Energies of members as the equations have them, one environment and one representative at a time.

Slow and written for reading: the oracle of `qualms.atomistic.forces`, whose forces must be the
numerical derivatives of these energies.
"""

import itertools

import numpy as np
from featomic import SoapPowerSpectrum

from qualms.atomistic.forces import Derivatives, derivative_rows
from qualms.features.compression import mixing_weights
from qualms.features.densities import expansion_options
from qualms.features.soap import in_cell, make_engine


def power_spectra(representation, scale, atoms):
    """The raw power spectrum of each atom, in float64, all pairs of species: (n_atoms, D)."""
    if scale.pseudo_species is not None:
        return mixed_spectra(representation, scale, atoms)
    engine = make_engine("featomic", scale, representation.species)
    calculator = SoapPowerSpectrum(**expansion_options(scale))
    spectra = np.zeros((len(atoms), engine.n_features))
    for key, block in calculator.compute(in_cell(atoms, scale)).items():
        pair = (int(key["neighbor_1_type"]), int(key["neighbor_2_type"]))
        for (_, atom), values in zip(block.samples.values, block.values, strict=True):
            spectra[atom, engine.pair_columns[pair]] = values
    return spectra


def mixed_spectra(representation, scale, atoms):
    """The power spectrum of pseudo-species, by its definition, a sum over all pairs of elements."""
    species, n = representation.species, scale.n_radial
    W = mixing_weights(species, scale.pseudo_species)
    elements = scale.model_copy(update={"pseudo_species": None})
    of_elements = power_spectra(representation, elements, atoms)
    of_pairs = make_engine("featomic", elements, species).pair_columns
    found = []
    for k, other in itertools.combinations_with_replacement(range(W.shape[1]), 2):
        total = np.zeros((len(atoms), scale.l_max + 1, n, n))
        for a, b in itertools.product(range(len(species)), repeat=2):
            pair = species[min(a, b)], species[max(a, b)]
            p = of_elements[:, of_pairs[pair]].reshape(total.shape)
            p = p if a == b else p / np.sqrt(2)
            total += W[a, k] * W[b, other] * (p if a <= b else p.swapaxes(2, 3))
        found.append((total if k == other else np.sqrt(2) * total).reshape(len(atoms), -1))
    return np.concatenate(found, axis=1)


def features(representation, s, atoms):
    """What the kernel of scale s sees of each atom."""
    spectra = power_spectra(representation, representation.settings.scales[s], atoms)
    if representation.projections:
        spectra = spectra @ representation.projections[s].matrix.astype(float)
    if representation.settings.normalize:
        return [y / np.linalg.norm(y) for y in spectra]
    return [y / representation.feature_scale for y in spectra]


def member_energies(fitted, atoms):
    """The energy of a structure by each member: (N_R,)."""
    representation = fitted.representation
    scales = representation.settings.scales
    total_weight = sum(scale.weight for scale in scales)
    energies = np.zeros(fitted.weights.shape[1])
    first = packed = 0
    for s, width in enumerate(representation.widths):
        X_M = fitted.representatives[:, first : first + width].astype(float)
        first += width
        share = fitted.kernel_scale * scales[s].weight / total_weight
        if fitted.has_label_basis:
            # The energy is linear in the products of two features, each pair once.
            pairs = list(itertools.combinations_with_replacement(range(width), 2))
            weights = fitted.weights[packed : packed + len(pairs)]
            packed += len(pairs)
            factor = fitted.kernel_scale * np.sqrt(scales[s].weight / total_weight)
            for x in features(representation, s, atoms):
                products = [x[a] * x[b] * (1.0 if a == b else 2**0.5) for a, b in pairs]
                energies += factor * np.array(products) @ weights
            continue
        for x in features(representation, s, atoms):
            kernel = np.array([power(x @ X, representation.settings.exponent) for X in X_M])
            energies += share * kernel @ fitted.weights
    for number in atoms.numbers:
        column = fitted.baseline.species.index(number)
        energies += fitted.baseline.members[column] + fitted.intercepts
    return energies


def power(product, exponent):
    """The power of a product, which counts as zero if it is negative and the power fractional."""
    if product < 0 and exponent != round(exponent):
        return 0.0
    return product**exponent


def kernel_rows(terms, frames, strain=False):
    """The rows of all components, summed over the terms of the kernel and over batches."""
    n, n_atoms, M = len(frames), sum(map(len, frames)), len(terms[0].representatives)
    total = Derivatives(np.zeros((n, M)), np.zeros((n_atoms, 3, M)), np.zeros((n, 6, M)))
    for term in terms:
        for tape in term.features.tapes(frames, ["positions", "strain"][: 1 + strain]):
            found = derivative_rows(term, tape, strain=strain)
            total.energies[tape.structures] += found.energies
            total.forces[tape.atoms] += found.forces
            if strain:
                total.virials[tape.structures] += found.virials
    return total


def derivative(function, step):
    """Central differences of fourth order of a function of one number, about zero."""
    values = [np.asarray(function(k * step)) for k in (1, -1, 2, -2)]
    return (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * step)


def moved(atoms, atom, axis, by):
    """The structure with one atom elsewhere."""
    copy = atoms.copy()
    copy.positions[atom, axis] += by
    return copy


def strained(atoms, a, b, by):
    """The structure under a symmetric strain, such that its energy changes by V σ_ab times it."""
    strain = np.zeros((3, 3))
    strain[a, b] += by / 2
    strain[b, a] += by / 2
    copy = atoms.copy()
    copy.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
    return copy
