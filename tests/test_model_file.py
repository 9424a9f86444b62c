"""Model files: what is read is what was saved, and invalid files are rejected."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from atomistic_fixtures import ENERGY, SMALL, labelled_alloys, make_model, same_predictions
from checks import metadata_of
from pydantic import BaseModel, ConfigDict

from qualms import AtomisticModel
from qualms.atomistic.model_file import FORMAT, PROTOCOL, write_model
from qualms.data import qm9
from qualms.errors import CalibrationError
from qualms.io.tensors import StorageError, read_tensors, write_tensors

ATOMS = dict.fromkeys("HCNOF", -1.0)

MODELS = {
    "extensive": {},
    "intensive": {
        "target": "atomization_energy_per_atom",
        "kind": "intensive",
        "baseline": "mean",
        "calibration": "power",
        "units": "eV/atom",
    },
    "atomic": {"target": "shift", "kind": "atomic", "species": ["H", "O"], "resample": "atoms"},
    "compressed": {"representation": SMALL | {"compression": {"n_features": 50}}},
    "smooth": {"representation": SMALL | {"smoothing": 0.5}, "baseline": ATOMS},
    "pseudo-species": {"representation": SMALL | {"pseudo_species": 2}},
    "chosen": {"representation": SMALL | {"preset": "auto"}},
    "two scales": {
        "representation": {
            "scales": [{"cutoff": 3.0, "n_radial": 3, "l_max": 2}, {"n_radial": 2, "weight": 0.5}],
            "exponent": 3,
            "normalize": False,
        },
        "calibration": "shrinkage",
        "seed": 7,
    },
    "bare": {"keep_pp": False, "noise": 1e-3, "replace": True, "calibration": None, "subsample": 9},
}


@pytest.fixture(scope="module")
def saved(molecules, tmp_path_factory):
    """A small model and its file."""
    model = make_model(n_representatives=30, units="eV").fit(molecules[:30])
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    model.save(path)
    return model, path


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_the_same(molecules, tmp_path, name):
    model = make_model(**{"target": ENERGY, **MODELS[name]}).fit(molecules[:30])
    path = tmp_path / "model.safetensors"
    model.save(path)
    loaded = AtomisticModel.load(path, threads=1)
    same_predictions(model, loaded, molecules[120:130])
    np.testing.assert_array_equal(model.fitted.origins, loaded.fitted.origins)
    assert loaded.settings == model.fitted.settings
    assert loaded.summary() == model.summary()
    for method in ("student", "sources"):
        first, second = (m.fitted.with_calibration(method) for m in (model, loaded))
        assert first.calibration_of("energy") == second.calibration_of("energy")
    loaded.save(tmp_path / "again.safetensors")
    assert metadata_of(tmp_path / "again.safetensors") == metadata_of(path)
    assert sorted(os.listdir(tmp_path)) == ["again.safetensors", "model.safetensors"]


def test_a_loaded_model_has_the_same_forces(alloys, force_model, tmp_path):
    force_model.save(tmp_path / "model.safetensors")
    loaded = AtomisticModel.load(tmp_path / "model.safetensors", threads=1)
    one, two = (m.predict(alloys[26:30], stress=True, forces=True) for m in (force_model, loaded))
    for name in ("energy", "forces", "stress"):
        first, second = getattr(one, name), getattr(two, name)
        atol = 1e-6 * first.std[first.std > 0].min()
        np.testing.assert_allclose(first.members, second.members, rtol=0, atol=atol)
    assert set(loaded.fitted.calibrations) == {"energy", "forces", "stress"}
    assert loaded.summary() == force_model.summary()


def is_rejected(path):
    with pytest.raises(StorageError) as caught:
        AtomisticModel.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


# --- inconsistent contents, with a checksum that is right ---


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


def forge(saved, path, change, version=PROTOCOL):
    """Change document and tensors, and write them with a checksum that is right."""
    tensors, found = read_tensors(saved[1], Anything, format=FORMAT, version=PROTOCOL)
    document = found.model_dump()
    change(document, tensors)
    write_tensors(path, tensors, Anything(**document), format=FORMAT, version=version)


def test_a_forged_file_without_a_change_is_a_model(saved, tmp_path, molecules):
    path = tmp_path / "model.safetensors"
    forge(saved, path, lambda document, tensors: None)
    same_predictions(saved[0], AtomisticModel.load(path), molecules[120:122])
    for version in (PROTOCOL - 1, PROTOCOL + 1):
        other = tmp_path / f"{version}.safetensors"
        forge(saved, other, lambda document, tensors: None, version=version)
        is_rejected(other)


def test_texts_of_a_file_have_no_lines_in_the_summary(saved, tmp_path):
    path = tmp_path / "model.safetensors"
    forge(saved, path, put("provenance", "created", value="today\ntarget  gap"))
    assert len(AtomisticModel.load(path).summary().splitlines()) == len(
        saved[0].summary().splitlines()
    )


def put(*keys, value):
    """Set a field of the document."""

    def change(document, tensors):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


def cut(name, axis=0):
    """Drop the last of a tensor."""

    def change(document, tensors):
        tensors[name] = np.delete(tensors[name], -1, axis=axis)

    return change


def fill(quantity, column, value):
    """Set the first value of a column of the out-of-bag points."""

    def change(document, tensors):
        place = document["points"][quantity]["columns"].index(column)
        tensors[f"points_{quantity}"][0, place] = value

    return change


def rename(quantity, column, name):
    """Rename a column of the out-of-bag points."""

    def change(document, tensors):
        columns = document["points"][quantity]["columns"]
        document["points"][quantity]["columns"] = [name if c == column else c for c in columns]

    return change


def sizes(*errors):
    """Set errors of numbers of representatives, and let the number be one that was chosen."""

    def change(document, tensors):
        document["record"]["size_curve"] = dict(enumerate(errors, 30))
        document["settings"]["n_representatives"] = "auto"

    return change


FORGERIES = {
    "a line in the units": put("settings", "units", value="eV\nmade  today"),
    "too many members": put("settings", "n_members", value=17),
    "too many posterior members": put("settings", "n_posterior", value=65),
    "no posterior members": put("settings", "uncertainty", value="subsampling"),
    "conformal scores that are missing": lambda d, t: t.pop("conformal_energy"),
    "a column too few": cut("points_energy", axis=1),
    "points without members": lambda d, t: t["points_energy"][:, 2].fill(0),
    "a negative deviation": lambda d, t: t["points_energy"][:, 1].__imul__(-1),
    "points without residuals": put("points", "energy", "columns", 0, value="labels"),
    "points of forces": lambda d, t: d["points"].update(forces=d["points"]["energy"]),
    "conformal scores in disorder": lambda d, t: t.update(
        conformal_energy=t["conformal_energy"][::-1]
    ),
    "an infinite variance": put(
        "calibrations", "energy", "parameters", "floor", value=float("inf")
    ),
    "a weight too few": cut("weights", axis=1),
    "an intercept too few": cut("intercepts"),
    "a representative too few": cut("representatives"),
    "a feature too few": cut("representatives", axis=1),
    "a species too few": put("species", value=[1, 6, 7, 8]),
    "a limit of novelty that is zero": put("element_novelty", "6", value=0.0),
    "a limit of novelty beyond one": put("element_novelty", "6", value=1.5),
    "a limit of novelty that is no number": put("element_novelty", "6", value=float("nan")),
    "a limit of novelty of an element too few": lambda d, t: d["element_novelty"].pop("6"),
    "a limit of novelty of an unknown element": put("element_novelty", "16", value=0.1),
    "limits of novelty of nothing": put("element_novelty", value=[0.1]),
    "species in disorder": put("species", value=[1, 7, 6, 8, 9]),
    "no element": put("species", value=[1, 6, 7, 8, 999]),
    "a variance too few": cut("pp_posterior"),
    "both variances too few": lambda d, t: [
        cut(f"pp_{n}")(d, t) for n in ("posterior", "whitening")
    ],
    "no Cholesky factor": lambda d, t: t["pp_posterior"].__imul__(-1),
    "no noise": put("pp_noise", value=0.0),
    "negative variance": put("pp_target_variance", value=-1.0),
    "no weights": lambda d, t: t.pop("weights"),
    "one more tensor": lambda d, t: t.update(code=np.zeros(3)),
    "other numbers": lambda d, t: t.update(weights=t["weights"].astype(np.int64)),
    "a field more": put("hook", value="os.system"),
    "a setting more": put("settings", "hook", value="os.system"),
    "other SOAP": put("settings", "representation", "scales", 0, "n_radial", value=4),
    "huge SOAP": put("settings", "representation", "scales", 0, "n_radial", value=10**9),
    "no SOAP": put("settings", "representation", value="auto"),
    "pseudo-species": put("settings", "representation", "scales", 0, "pseudo_species", value=2),
    "a projection": put("features", "n_projections", value=1),
    "a network": put("settings", "representation", value={"backbone": "sevennet"}),
    "features of a network": put("features", value={"n_raw": 128}),
    "unknown calibration": put("settings", "calibration", value="best"),
    "no calibration": put("calibrations", value={}),
    "calibration of forces": lambda d, t: d["calibrations"].update(
        forces=d["calibrations"]["energy"]
    ),
    "unknown method": put("calibrations", "energy", "method", value="x"),
    "negative alpha": put("calibrations", "energy", "parameters", "alpha", value=-1.0),
    "unknown beta": put("calibrations", "energy", "parameters", "beta", value=1.0),
    "no scale": put("kernel_scale", value=0.0),
    "infinite cutoff": put("settings", "representation", "scales", 0, "cutoff", value=1e300),
    "wide Gaussians": put("settings", "representation", "scales", 0, "gaussian_width", value=1e9),
    "negative prior": put("calibrations", "energy", "parameters", "log_std_std", value=-1.0),
    "fraction of members": put("calibrations", "energy", "parameters", "n_subsampled", value=3.5),
    "factors of elements of structures": put("calibrations", "energy", "elements", "C", value=2.0),
    "no factor of an element": put("calibrations", "energy", "elements", "C", value=0.0),
    "too isotropic": put("calibrations", "energy", "isotropy", value=1.5),
    "steep power": put("calibrations", "energy", "parameters", "gamma", value=1e3),
    "vanishing Cholesky factor": lambda d, t: t["pp_posterior"].__setitem__(0, 1e-30),
    "no record": put("record", "quantities", value=[]),
    "no record of energies": lambda d, t: d["record"]["quantities"].clear(),
    "a record of forces": lambda d, t: d["record"]["quantities"].update(
        forces=d["record"]["quantities"]["energy"]
    ),
    "targets that are equal": put("record", "target_std", value=0.0),
    "one size": sizes(0.1),
    "sizes without an error": sizes(0.0, 0.1),
    "more subsampled members": put(
        "calibrations", "energy", "parameters", "n_subsampled", value=100
    ),
    "fewer subsampled members": put(
        "calibrations", "energy", "parameters", "n_subsampled", value=2
    ),
    "points of components": rename("energy", "posterior_std", "component_std"),
    "a column twice": rename("energy", "novelty_std", "posterior_std"),
    "fractions of members": fill("energy", "n_members", 3.5),
    "a huge number of members": fill("energy", "n_members", 1e30),
}

FORGERIES_OF_FORCES = {
    "components without a multiplicity": rename("forces", "multiplicity", "novelty_std"),
    "components that are nowhere": fill("forces", "multiplicity", 0.0),
    "no element": fill("forces", "element", 0.0),
    "an element after the last": fill("forces", "element", 119.0),
    "half an element": fill("forces", "element", 1.5),
    "a huge element": fill("forces", "element", 1e30),
    "more subsampled members": put(
        "calibrations", "stress", "parameters", "n_subsampled", value=100
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_inconsistent_parts(saved, tmp_path, name):
    forge(saved, tmp_path / "model.safetensors", FORGERIES[name])
    is_rejected(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", FORGERIES_OF_FORCES)
def test_inconsistent_parts_of_forces(tmp_path, name):
    stored = None, Path(__file__).parent / "stored" / "forces-10.safetensors"
    forge(stored, tmp_path / "model.safetensors", FORGERIES_OF_FORCES[name])
    is_rejected(tmp_path / "model.safetensors")


# --- files of earlier versions ---


@pytest.mark.parametrize("version", range(10, PROTOCOL + 1))
def test_stored_models_are_read_and_predict_the_same(version):
    """Every version from 10 on is read by all later ones."""
    folder = Path(__file__).parent / "stored"
    expected = json.loads((folder / f"predictions-{version}.json").read_text())
    energies = AtomisticModel.load(folder / f"energies-{version}.safetensors", threads=1)
    found = energies.predict(qm9(n=65)[60:])
    atol = 1e-5 * np.min(expected["energies"]["std"])
    np.testing.assert_allclose(found.mean, expected["energies"]["mean"], rtol=0, atol=atol)
    np.testing.assert_allclose(found.std, expected["energies"]["std"], rtol=1e-5)
    forces = AtomisticModel.load(folder / f"forces-{version}.safetensors", threads=1)
    new = forces.predict(labelled_alloys(27)[24:], forces=True, stress=True)
    np.testing.assert_allclose(new.forces.mean, expected["forces"]["mean"], atol=1e-6)
    np.testing.assert_allclose(new.forces.std, expected["forces"]["std"], rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(new.stress.std, expected["forces"]["stress"], rtol=1e-4, atol=1e-9)
    assert energies.fitted.with_calibration("student").calibration.method == "student"


def test_models_of_earlier_versions_have_one_limit_of_novelty(saved, molecules, tmp_path):
    """That of the file, for all elements; also files of this version without limits of elements."""
    folder, path = Path(__file__).parent / "stored", tmp_path / "model.safetensors"
    forge(saved, path, lambda document, tensors: document.pop("element_novelty"))
    limit = saved[0].fitted.training_novelty[0]
    for stored, rounding in ((folder / "energies-10.safetensors", 1e-6), (path, 0.0)):
        model = AtomisticModel.load(stored, threads=1)
        fitted, frames = model.fitted, molecules[120:125]
        assert fitted.element_novelty == {}
        limit = fitted.training_novelty[0] + rounding
        np.testing.assert_allclose(fitted.novelty_limits(np.array([1, 6, 8])), limit)
        predicted = model.predict(frames, atoms=True)
        for s, (chunk,) in enumerate(model.chunks([atoms]) for atoms in frames):
            x, X = (a.astype(float) for a in (chunk.batch.features, fitted.representatives))
            kernel = (x @ X.T) ** fitted.representation.settings.exponent
            expected = (1 - kernel.max(axis=1)) / limit
            np.testing.assert_allclose(predicted.atom_novelty[s], expected, atol=1e-4)
            assert predicted.novelty[s] == predicted.atom_novelty[s].max()
            assert ("is novel" in predicted.reasons[s]) == (predicted.novelty[s] > 1)


def test_models_keep_the_number_of_posterior_members(molecules, tmp_path):
    """Files of earlier versions do not name it, where it was the default of that time."""
    model = make_model(n_representatives=30, n_posterior=16).fit(molecules[:30])
    unnamed = model.fitted.settings.model_copy(update={"n_posterior": None})
    path = tmp_path / "model.safetensors"
    write_model(path, replace(model.fitted, settings=unnamed), force=False)
    loaded = AtomisticModel.load(path, threads=1)
    same_predictions(model, loaded, molecules[120:130])
    assert loaded.settings.n_posterior == 16


def test_other_calibrations_need_points(molecules):
    """A method that cannot be fitted is an error, and never a model without a calibration."""
    model = make_model(n_representatives=30).fit(molecules[:60])
    other = model.fitted.with_calibration("auto")
    assert other.settings.calibration == other.calibration.method != "auto"
    assert model.fitted.with_calibration(None).calibration.method == "none"
    with pytest.raises(CalibrationError):
        replace(model.fitted, points={}).with_calibration("student")
