"""Model files: what comes back is what was saved, and nothing else comes back."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from ase.data import atomic_numbers
from atomistic_fixtures import ENERGY, SMALL, make_model, same_predictions
from pydantic import BaseModel, ConfigDict
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from qualms import AtomisticModel, InputError
from qualms.atomistic.model_file import FORMAT, PROTOCOL, read_model_document
from qualms.io.tensors import StorageError, read_tensors, write_tensors

SOURCES = Path(__file__).parents[1] / "src"
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


def metadata_of(path):
    with safe_open(path, "np") as file:
        return file.metadata()


@pytest.fixture(scope="module")
def saved(molecules, tmp_path_factory):
    """A small model and its file."""
    model = make_model(n_representatives=30, units="eV").fit(molecules[:30])
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    model.save(path)
    return model, path


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_back_is_the_same_to_the_last_bit(molecules, tmp_path, name):
    model = make_model(**{"target": ENERGY, **MODELS[name]}).fit(molecules[:30])
    path = tmp_path / "model.safetensors"
    model.save(path)
    loaded = AtomisticModel.load(path, threads=1)
    same_predictions(model, loaded, molecules[120:130])
    for mine, its in zip(
        model.predict_atoms(molecules[120:122]), loaded.predict_atoms(molecules[120:122]),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(mine.members, its.members)
    np.testing.assert_array_equal(model.fitted.membership, loaded.fitted.membership)
    np.testing.assert_array_equal(model.fitted.origins, loaded.fitted.origins)
    assert loaded.settings == model.settings
    assert loaded.summary() == model.summary()
    assert loaded.fitted.calibrations == dict(model.fitted.calibrations)
    assert loaded.internal is None
    # A file of the loaded model says the same, though safetensors shuffles its metadata.
    loaded.save(tmp_path / "again.safetensors")
    assert metadata_of(tmp_path / "again.safetensors") == metadata_of(path)
    assert sorted(os.listdir(tmp_path)) == ["again.safetensors", "model.safetensors"]


def test_the_document_says_where_the_model_comes_from(saved):
    model, path = saved
    document = read_model_document(path)
    assert document.settings == model.settings
    assert document.provenance.packages.keys() >= {"qualms", "numpy", "ase", "dscribe"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", document.provenance.created)
    assert document.record.n_structures == 30
    assert document.species == tuple(atomic_numbers[s] for s in "HCNOF")
    assert {"student", "linear", "none"} <= document.calibrations.keys()


def test_other_programs_can_look_into_the_file(saved):
    model, path = saved
    with safe_open(path, "np") as file:
        assert file.metadata()["format"] == FORMAT
        assert file.get_tensor("weights").tobytes() == model.fitted.weights.tobytes()
        n = len(model.fitted.representatives)
        assert file.get_tensor("pp_whitening").shape == (n * (n + 1) // 2,)


def test_nothing_is_ever_unpickled_or_executed():
    dangerous = (
        r"import (c?pickle|dill|marshal|shelve)|allow_pickle=True|joblib\.load|\b(eval|exec)\("
    )
    for path in SOURCES.rglob("*.py"):
        assert not re.search(dangerous, path.read_text()), path


def test_an_existing_file_is_replaced_only_by_force(saved, tmp_path):
    model, _ = saved
    path = tmp_path / "model.safetensors"
    path.write_text("precious")
    with pytest.raises(InputError, match="does not exist yet"):
        model.save(path)
    assert path.read_text() == "precious"
    model.save(path, force=True)
    assert AtomisticModel.load(path).settings == model.settings
    assert os.listdir(tmp_path) == ["model.safetensors"]


def refused(path, match=None):
    with pytest.raises(StorageError, match=match) as caught:
        AtomisticModel.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message


# --- damage ---


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.01, 0.3, 0.9, 0.9999])
def test_truncated_files(saved, tmp_path, share):
    data = saved[1].read_bytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(data[: int(share * len(data))])
    refused(path)


def test_flipped_bits(saved, tmp_path):
    rng = np.random.default_rng(0)
    data = saved[1].read_bytes()
    header = int.from_bytes(data[:8], "little")
    path = tmp_path / "model.safetensors"
    for position in [*range(9), *rng.integers(8, header, 30), *rng.integers(header, len(data), 30)]:
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        refused(path)


def test_what_is_no_model_at_all(tmp_path):
    refused(tmp_path / "none.safetensors", "No such file")
    refused(tmp_path)
    foreign = tmp_path / "foreign.safetensors"
    save_file({"weights": np.zeros(3)}, foreign)
    refused(foreign, "not a qualms model")
    text = tmp_path / "text.safetensors"
    text.write_text("energy=3\n" * 100)
    refused(text, "not a safetensors file")


# --- forgery ---


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


def forge(saved, path, change, version=PROTOCOL):
    """Change document and tensors, and write them with a checksum that is right."""
    tensors, document = read_tensors(saved[1], Anything, format=FORMAT, version=PROTOCOL)
    document = document.model_dump()
    change(document, tensors)
    write_tensors(path, tensors, Anything(**document), format=FORMAT, version=version)


def test_a_forged_file_without_a_change_is_a_model(saved, tmp_path, molecules):
    path = tmp_path / "model.safetensors"
    forge(saved, path, lambda document, tensors: None)
    same_predictions(saved[0], AtomisticModel.load(path), molecules[120:122])


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


FORGERIES = {
    "too many members": (put("settings", "n_members", value=17), "n_members = 17"),
    "a weight too few": (cut("weights", axis=1), "weights"),
    "an intercept too few": (cut("intercepts"), "intercepts"),
    "a representative too few": (cut("representatives"), "expected"),
    "a feature too few": (cut("representatives", axis=1), "479 features instead of 480"),
    "a row too few": (cut("membership"), "rows = 30"),
    "a species too few": (put("species", value=[1, 6, 7, 8]), "species = 4"),
    "species in disorder": (put("species", value=[1, 7, 6, 8, 9]), "species"),
    "no element": (put("species", value=[1, 6, 7, 8, 999]), "species"),
    "a variance too few": (cut("pp_posterior"), "triangle|pp_posterior"),
    "both variances too few": (lambda d, t: (cut("pp_posterior")(d, t), cut("pp_whitening")(d, t)),
                               "elements"),
    "no Cholesky factor": (lambda d, t: t["pp_posterior"].__imul__(-1), "Cholesky"),
    "no noise": (put("pp_noise", value=0.0), "pp_noise"),
    "negative variance": (put("pp_target_variance", value=-1.0), "pp_target_variance"),
    "no weights": (lambda d, t: t.pop("weights"), "'weights' is missing"),
    "one more tensor": (lambda d, t: t.update(code=np.zeros(3)), "'code' is unknown"),
    "other numbers": (lambda d, t: t.update(weights=t["weights"].astype(np.int64)), "int64"),
    "a field more": (put("hook", value="os.system"), "hook"),
    "a setting more": (put("settings", "hook", value="os.system"), "settings"),
    "other SOAP": (put("settings", "representation", "scales", 0, "n_radial", value=4), "features"),
    "huge SOAP": (put("settings", "representation", "scales", 0, "n_radial", value=10**9),
                  "less than or equal to 100"),
    "a projection": (put("n_projections", value=1), "projection_0"),
    "calibration without a name": (put("settings", "calibration", value="best"), "calibration"),
    "calibration that is not there": (lambda d, t: d["calibrations"].pop("student"), "no calib"),
    "calibration of no method": (put("calibrations", "student", "method", value="x"), "method="),
    "calibration that turns": (put("calibrations", "linear", "parameters", "alpha", value=-1.0),
                               "error bar of -"),
    "calibration of too much": (put("calibrations", "student", "parameters", "beta", value=1.0),
                                "belong together"),
    "no scale": (put("kernel_scale", value=0.0), "kernel_scale"),
    "words": (put("kernel_scale", value="large"), "kernel_scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_parts_that_do_not_belong_together(saved, tmp_path, name):
    change, match = FORGERIES[name]
    path = tmp_path / "model.safetensors"
    forge(saved, path, change)
    refused(path, match)


def test_projections_must_fit_the_representation(molecules, tmp_path):
    compressed = SMALL | {"compression": {"n_features": 20}}
    model = make_model(representation=compressed, n_representatives=20).fit(molecules[:20])
    model.save(tmp_path / "model.safetensors")
    forged = tmp_path / "forged.safetensors"
    forge((model, tmp_path / "model.safetensors"), forged, cut("projection_0"))
    refused(forged, "projections of")


def test_a_newer_protocol_is_named(saved, tmp_path):
    path = tmp_path / "model.safetensors"
    forge(saved, path, lambda document, tensors: None, version=PROTOCOL + 1)
    refused(path, f"newer qualms.*{PROTOCOL + 1}")


def test_nan_in_a_tensor(saved, tmp_path):
    tensors = load_file(saved[1])
    tensors["weights"][0, 0] = np.nan
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata=metadata_of(saved[1]))
    refused(path, "NaN")
