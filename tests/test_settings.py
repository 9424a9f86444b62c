"""Settings: what is wrong is named; what is right survives a file. Checkpoints: nothing is lost."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualms.atomistic.settings import Settings, as_number, make_settings
from qualms.atomistic.training import Checkpoint, run_key
from qualms.errors import InputError
from qualms.features.hypers import PRESETS, RadialScaling, Scale, Soap, make_soap

# --- hyper-parameters of the representation ---


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_they_say_and_survive_json(name):
    preset = make_soap(name)
    assert preset == PRESETS[name]
    assert Soap.model_validate_json(preset.model_dump_json()) == preset
    assert make_soap(json.loads(preset.model_dump_json())) == preset
    assert preset.resolved_engine == "dscribe"


def test_overrides_change_what_they_name_and_nothing_else():
    changed = make_soap("nmr", cutoff=4.5, exponent=3, compression=None)
    assert changed.scales[0] == PRESETS["nmr"].scales[0].model_copy(update={"cutoff": 4.5})
    assert (changed.exponent, changed.compression) == (3, None)
    assert make_soap(changed, cutoff=5.0, exponent=2, compression="auto") == PRESETS["nmr"]
    assert make_soap({"preset": "nmr", "cutoff": 4.5}, exponent=3, compression=None) == changed
    assert make_soap({"cutoff": 4.5}) == make_soap("organic", cutoff=4.5)
    assert PRESETS["nmr"].scales[0].cutoff == 5.0


def test_overrides_apply_to_every_scale():
    for scales in ([{"cutoff": 3.0}, {"cutoff": 6.0}], [Scale(cutoff=3.0), Scale(cutoff=6.0)]):
        two = make_soap("general", scales=scales, l_max=2, radial_scaling={"scale": 3.0})
        assert [s.cutoff for s in two.scales] == [3.0, 6.0]
        assert {s.l_max for s in two.scales} == {2}
        assert {s.radial_scaling for s in two.scales} == {RadialScaling(scale=3.0)}


def test_smoothing_needs_featomic():
    assert make_soap("organic", smoothing=0.5).resolved_engine == "featomic"
    assert make_soap("organic", engine="featomic").resolved_engine == "featomic"
    for wrong in (
        {"smoothing": 0.5, "engine": "dscribe"},
        {"smoothing": 0.5, "radial_basis": "polynomial"},
        {"engine": "featomic", "radial_basis": "polynomial"},
    ):
        with pytest.raises(InputError, match=r"featomic|dscribe") as caught:
            make_soap("organic", **wrong)
        assert caught.value.parameter == "representation"


@pytest.mark.parametrize("name", ["bogus", 5, None, {"preset": "bogus"}, {"preset": 5}])
def test_unknown_representations_are_named(name):
    with pytest.raises(InputError) as caught:
        make_soap(name)
    assert caught.value.parameter == "representation"


BAD_SCALE = [
    ("cutoff", 1.0),
    ("cutoff", float("nan")),
    ("cutoff", "far"),
    ("smoothing", 0.0),
    ("gaussian_width", 0.0),
    ("gaussian_width", float("inf")),
    ("n_radial", 0),
    ("n_radial", 2.5),
    ("l_max", -1),
    ("l_max", 21),
    ("radial_basis", "bessel"),
    ("radial_scaling", 3.0),
    ("center_weight", -1.0),
    ("weight", 0.0),
]
BAD_SOAP = [
    ("exponent", 0.5),
    ("exponent", float("nan")),
    ("normalize", "perhaps"),
    ("compression", 100),
    ("compression", "much"),
    ("engine", "quip"),
    ("scales", []),
    ("scales", 5),
    ("scales.0", [5]),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [(f"scales.0.{field}", value) for field, value in BAD_SCALE]
    + BAD_SOAP
    + [
        ("scales.0.radial_scaling.scale", {"radial_scaling": {"scale": -1}}),
        ("scales.0.radial_scaling.speed", {"radial_scaling": {"speed": 1}}),
        ("compression.method", {"compression": {"method": "magic"}}),
        ("compression.n_features", {"compression": {"n_features": 0}}),
        ("scales.1.cutof", {"scales": [{}, {"cutof": 3}]}),
        ("scales.0", {"scales": [5], "l_max": 3}),
        ("scales", {"scales": 5, "l_max": 3}),
        ("representation", {"cutof": 3}),
    ],
)
def test_hyper_parameters_that_are_wrong_are_named(name, value):
    field = name.removeprefix("scales.0.").split(".")[0]
    overrides = value if isinstance(value, dict) else {field: value}
    with pytest.raises(InputError) as caught:
        make_soap("organic", **overrides)
    assert caught.value.parameter == name
    # The same words if they come with all other settings.
    with pytest.raises(InputError) as again:
        make_settings({"target": "e", "representation": overrides})
    assert str(again.value) == str(caught.value)


def test_unknown_names_come_with_those_that_are_known():
    with pytest.raises(InputError, match=r"unknown cutof, l.*gaussian_width") as caught:
        make_soap("organic", cutof=3, l=2)
    assert caught.value.parameter == "representation"


# --- settings ---

BAD_SETTINGS = [
    ("target", ""),
    ("target", 5),
    ("kind", "size"),
    ("representation", 5),
    ("representation", None),
    ("representation", "bogus"),
    ("species", 6),
    ("species", []),
    ("species", " , "),
    ("species", "H Qq"),
    ("species", [0]),
    ("species", [119]),
    ("species", [6.5]),
    ("n_representatives", 0),
    ("n_representatives", 2.5),
    ("selection", "best"),
    ("per_species", None),
    ("baseline", "zero"),
    ("baseline", 5),
    ("baseline", {"Qq": 1.0}),
    ("baseline", {"H": "much"}),
    ("noise", 0.0),
    ("noise", -1.0),
    ("noise", float("inf")),
    ("noise", "little"),
    ("forces", ""),
    ("forces", "forces"),
    ("stress", 5),
    ("stress", "stress"),
    ("forces_noise", 0.0),
    ("forces_noise", "little"),
    ("forces_noise", 0.01),
    ("stress_noise", "auto!"),
    ("stress_noise", 0.01),
    ("noise_per", "bond"),
    ("noise_per", "structure"),
    ("n_members", 1),
    ("n_members", "many"),
    ("subsample", 0.0),
    ("subsample", 1),
    ("subsample", 1.5),
    ("resample", "bonds"),
    ("replace", "perhaps"),
    ("calibration", "magic"),
    ("calibration", ["linear"]),
    ("units", 5),
    ("seed", -1),
    ("seed", 0.5),
    ("keep_pp", 3),
    ("n_member", 3),
]


@pytest.mark.parametrize(("name", "value"), BAD_SETTINGS)
def test_settings_that_are_wrong_are_named(name, value):
    with pytest.raises(InputError) as caught:
        make_settings({"target": "e", "kind": "atomic", name: value})
    assert caught.value.parameter == name
    assert "\n" not in str(caught.value)


def test_every_setting_that_can_be_wrong_is_in_the_list_above():
    assert {name for name, _ in BAD_SETTINGS} >= set(Settings.model_fields)


def test_what_may_be_of_several_kinds_is_told_all_of_them():
    with pytest.raises(InputError, match=r"'loo' or 'evidence'.*greater than 0"):
        make_settings({"target": "e", "noise": -1.0})
    with pytest.raises(InputError, match=r"integer.*less than 1"):
        make_settings({"target": "e", "subsample": 1.5})


def test_a_target_there_must_be():
    with pytest.raises(InputError) as caught:
        make_settings({})
    assert caught.value.parameter == "target"


@pytest.mark.parametrize(("name", "value"), [("species", "H"), ("resample", "atoms")])
def test_what_only_targets_of_atoms_have(name, value):
    with pytest.raises(InputError, match="atomic") as caught:
        make_settings({"target": "e", name: value})
    assert caught.value.parameter == name
    make_settings({"target": "e", "kind": "atomic", name: value})


@pytest.mark.parametrize("species", ["O, H,C", "8 1 6", ["O", 1, "C"], ("6", "8", "H"), {1, 6, 8}])
def test_species_by_symbol_or_number(species):
    settings = make_settings({"target": "e", "kind": "atomic", "species": species})
    assert settings.species == (1, 6, 8)


def test_elements_by_symbol_or_number():
    assert [as_number(z) for z in ("H", 1, "118", " Og ", np.int64(6))] == [1, 1, 118, 118, 6]
    for wrong in ("X", "h", 0, -1, 119, "", "6.0", None):
        with pytest.raises(ValueError, match="no chemical element"):
            as_number(wrong)


@given(
    kind=st.sampled_from(["extensive", "intensive", "atomic"]),
    representation=st.sampled_from([*PRESETS, {"cutoff": 3.5, "smoothing": 0.5}]),
    baseline=st.sampled_from(["none", "composition", {"H": -13.6, 8: -2041.0}]),
    noise=st.just("loo") | st.floats(1e-12, 1e6),
    subsample=st.integers(2, 10**6) | st.floats(1e-3, 0.999),
    calibration=st.sampled_from([None, "none", "linear", "student"]),
)
def test_settings_survive_json(**given):
    settings = make_settings({"target": "e", **given})
    assert make_settings(json.loads(settings.model_dump_json())) == settings
    assert settings.noise == given["noise"]
    assert settings.subsample == given["subsample"]
    assert settings.calibration == (given["calibration"] or "none")
    if isinstance(given["baseline"], dict):
        assert settings.baseline == {1: -13.6, 8: -2041.0}


# --- checkpoints ---

ARRAYS = {"x": np.arange(6.0).reshape(2, 3), "y": np.array([3, 1], dtype=np.int64)}


def test_stages_are_found_again(tmp_path):
    first = Checkpoint(tmp_path / "a" / "run", "key", resume=False)
    assert not first.has("selection")
    first.save("selection", {**ARRAYS, "x": np.asfortranarray(ARRAYS["x"])}, {"scale": 0.1})
    first.path("features").write_bytes(b"1234")
    first.complete("features")
    again = Checkpoint(tmp_path / "a" / "run", "key", resume=True)
    assert again.has("selection")
    assert again.has("features")
    assert not again.has("weights")
    arrays, values = again.load("selection")
    assert values == {"scale": 0.1}
    assert arrays.keys() == ARRAYS.keys()
    for name, expected in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], expected)
        assert arrays[name].dtype == expected.dtype
    assert again.path("features").read_bytes() == b"1234"
    again.remove()
    assert list((tmp_path / "a").iterdir()) == []


def test_without_resume_a_run_starts_anew(tmp_path):
    Checkpoint(tmp_path, "key", resume=False).save("selection", ARRAYS)
    assert not Checkpoint(tmp_path, "key", resume=False).has("selection")
    assert not Checkpoint(tmp_path, "key", resume=True).has("selection")


def test_to_resume_what_never_began_is_to_begin(tmp_path):
    checkpoint = Checkpoint(tmp_path / "run", "key", resume=True)
    checkpoint.save("selection", ARRAYS)
    assert Checkpoint(tmp_path / "run", "key", resume=True).has("selection")


def test_a_stage_that_was_not_finished_is_not_there(tmp_path):
    checkpoint = Checkpoint(tmp_path, "key", resume=False)
    checkpoint.path("features").write_bytes(b"half of it")
    assert not Checkpoint(tmp_path, "key", resume=True).has("features")


def refused(directory, match, *, resume, key="key"):
    """The checkpoint is refused by name, and what is there stays as it was."""
    before = {p: p.read_bytes() for p in directory.rglob("*")} if directory.is_dir() else None
    with pytest.raises(InputError, match=match) as caught:
        Checkpoint(directory, key, resume=resume)
    if before is not None:
        assert {p: p.read_bytes() for p in directory.rglob("*")} == before
    return caught.value.parameter


def test_a_checkpoint_of_something_else_is_not_resumed(tmp_path):
    Checkpoint(tmp_path, "key", resume=False).save("selection", ARRAYS)
    assert refused(tmp_path, "same data and settings", resume=True, key="other") == "resume"
    assert Checkpoint(tmp_path, "key", resume=True).has("selection")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b'{"version": 1, "key": "key", "stages": 5}'],
)
def test_a_damaged_manifest_is_not_resumed_but_replaced(tmp_path, content):
    Checkpoint(tmp_path, "key", resume=False).save("selection", ARRAYS)
    (tmp_path / "manifest.json").write_bytes(content)
    assert refused(tmp_path, "readable checkpoint", resume=True) == "resume"
    Checkpoint(tmp_path, "key", resume=False)
    assert not Checkpoint(tmp_path, "key", resume=True).has("selection")


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-1], lambda b: b"\xff" + b[1:]])
def test_a_damaged_stage_is_not_loaded(tmp_path, damage):
    Checkpoint(tmp_path, "key", resume=False).save("selection", ARRAYS)
    file = tmp_path / "selection"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InputError, match="without --resume") as caught:
        Checkpoint(tmp_path, "key", resume=True).load("selection")
    assert caught.value.parameter == "resume"
    file.unlink()
    with pytest.raises(InputError):
        Checkpoint(tmp_path, "key", resume=True).load("selection")


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [("thesis.tex", "years of work"), ("manifest.json", '{"name": "my web site"}')],
)
def test_a_directory_of_someone_else_is_refused_and_untouched(tmp_path, resume, name, content):
    (tmp_path / name).write_text(content)
    assert refused(tmp_path, "new directory", resume=resume) == "checkpoint"


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "run").write_text("years of work")
    assert refused(tmp_path / "run", "directory", resume=False) == "checkpoint"
    assert (tmp_path / "run").read_text() == "years of work"


def test_a_stage_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path, "key", resume=False)
    checkpoint.save("selection", ARRAYS)
    monkeypatch.setattr("qualms.atomistic.training.save", lambda arrays: "not bytes")
    with pytest.raises(TypeError):
        checkpoint.save("selection", {"x": np.zeros(1)})
    arrays, _ = Checkpoint(tmp_path, "key", resume=True).load("selection")
    np.testing.assert_array_equal(arrays["x"], ARRAYS["x"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest.json", "selection"]


def test_keys_tell_runs_apart():
    keys = [run_key("a", "b"), run_key("ab"), run_key("a", "b", ""), run_key("b", "a"), run_key()]
    assert len(set(keys)) == len(keys)
    assert run_key("a", "b") == keys[0]
