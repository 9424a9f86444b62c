"""Mutated files end in a result or an error, never in a crash, hang, other exception or NaN.

Each kind of file is mutated in a subprocess with limits of time and memory. ``make fuzz`` tries
many mutations; one is repeated by ``python tests/test_fuzz.py KIND NUMBER NUMBER+1 FOLDER``.
"""

import io
import json
import re
import resource
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

#: Mutations of each kind, usually and in slow tests; seconds of one, and bytes of memory.
FEW, MANY = 25, 10_000
SECONDS, MEMORY = 30, 6 * 10**9
NUMBERS = [0, -1, 1, 2, 3.5, 1e-300, 1e-30, 1e6, 1e16, 1e30, 1e155, 1e300, -1e300, 2**31, 2**63]
NUMBERS += [float("nan"), float("inf"), -float("inf")]
OTHERS = [None, True, "", "x", "\0", "é" * 50, [], [1, 2], {}, {"a": 1}, 10**400]
TOKENS = [str(v) for v in NUMBERS] + ["", "None", "T", "[[]]", "{}", "=", '"', ",", ";", " ", "\n"]
KINDS = ("model", "calibration", "xyz", "csv", "npz", "parquet")


# --- mutations ---


def damaged(content, rng):
    """Change some bytes, numbers or lines."""
    content = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        at, n = (int(i) for i in rng.integers(0, max(len(content), 1), 2))
        end = at + 1 + n % 50
        spans = [m.span() for m in re.finditer(rb"-?\d+\.?\d*(e[-+]\d+)?", content[at : at + 5000])]
        lines = content.splitlines(keepends=True)
        match rng.integers(8):
            case 0:
                content[at:end] = rng.bytes(end - at)
            case 1:
                del content[at:end]
            case 2:
                content[at:at] = content[at:end] * int(rng.integers(1, 20))
            case 3:
                del content[at:]
            case 4 if lines:
                i, j = rng.integers(0, len(lines), 2)
                lines[i], lines[j] = lines[j], lines[i]
                content = bytearray(b"".join(lines))
            case 5 if content:
                content[at % len(content)] ^= 1 << int(rng.integers(8))
            case _ if spans:
                first, last = spans[rng.integers(len(spans))]
                content[at + first : at + last] = str(rng.choice(TOKENS)).encode()
            case _:
                content[at:at] = str(rng.choice(TOKENS)).encode()
    return bytes(content)


def changed(document, rng, *parts):
    """Change one value of a JSON document, often in one of the parts given, or its key."""
    place = document
    if parts and rng.random() < 0.5:
        place = document.get(str(rng.choice(parts)), document)
    if not isinstance(place, (dict, list)):
        return
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = keys[rng.integers(len(keys))]
        if not isinstance(place[key], (dict, list)) or rng.random() < 0.1:
            break
        place = place[key]
    every = NUMBERS if rng.random() < 0.7 else OTHERS
    # A copy: another change may put something into it, even itself.
    value = deepcopy(every[rng.integers(len(every))])
    if isinstance(place[key], float) and rng.random() < 0.3:
        value = place[key] * 10 ** rng.uniform(-20, 20)
    match rng.integers(8):
        case 0:
            del place[key]
        case 1 if isinstance(place, dict):
            place["x"] = value
        case _:
            place[key] = value


def changed_array(array, rng):
    """Change numbers, the type or the shape of an array."""
    array = np.array(array)
    flat = array.reshape(-1)
    match rng.integers(8):
        case 0:
            return array.astype(rng.choice(["f4", "i8", "f2", "c16", "S3", "bool"]))
        case 1:
            return array[..., :-1] if array.ndim else array
        case 2:
            return array.T[None]
        case 3:
            return array * np.float64(rng.choice([0, -1, 1e-30, 1e20, 1e200]))
        case _ if flat.size and flat.dtype.kind == "f":
            flat[rng.integers(0, flat.size, int(rng.integers(1, 5)))] = rng.choice(NUMBERS)
        case _ if flat.size and flat.dtype.kind in "iu":
            flat[rng.integers(flat.size)] ^= 1 << int(rng.integers(7))
    return array


def forged_model(good, rng):
    """Change the document or a tensor of a model, and write it with the right checksum."""
    from safetensors.numpy import load, save

    from qualms.io import tensors

    metadata = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])["__metadata__"]
    arrays, document = load(good), json.loads(metadata["document"])
    if rng.random() < 0.7:
        for _ in range(rng.integers(1, 3)):
            changed(document, rng, "settings", "calibrations", "record", "points")
    else:
        name = rng.choice(sorted(arrays))
        arrays[name] = np.ascontiguousarray(changed_array(arrays[name], rng))
    metadata["document"] = json.dumps(document)
    arrays = {name: a for name, a in arrays.items() if a.dtype in tensors.DTYPES}
    metadata["checksum"] = tensors.checksum(metadata, arrays)
    return save(arrays, metadata)


def forged_calibration(good, rng):
    document = json.loads(good)
    method = document["method"] = str(
        rng.choice(["none", "linear", "power", "student", "shrinkage"])
    )
    if method != "shrinkage":
        for name in ("log_std_mean", "log_std_std"):
            del document["parameters"][name]
    for _ in range(rng.integers(1, 4)):
        changed(document, rng, "parameters")
    text = json.dumps(document)
    if rng.random() < 0.1:  # nested deeply
        n = int(10 ** rng.uniform(1, 5))
        left, right = [("[", "]"), ('{"a":', "}")][rng.integers(2)]
        values = [m.span() for m in re.finditer(r'(?<=: )("\w*"|[\d.]+|null)', text)]
        first, last = values[rng.integers(len(values))]
        text = text[:first] + left * n + "1" + right * n + text[last:]
    return text.encode()


def forged_npz(good, rng):
    arrays = dict(np.load(io.BytesIO(good)))
    name = rng.choice(sorted(arrays))
    arrays[name] = changed_array(arrays[name], rng)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def forged_parquet(good, rng):
    import pandas as pd

    frame = pd.read_parquet(io.BytesIO(good))
    name = rng.choice(frame.columns)
    values = changed_array(frame[name].to_numpy(), rng)
    usable = values.shape == (len(frame),) and values.dtype.kind != "c"
    frame[name] = values if usable else str(rng.choice(TOKENS))
    buffer = io.BytesIO()
    frame.to_parquet(buffer)
    return buffer.getvalue()


FORGED = {
    "model": forged_model,
    "calibration": forged_calibration,
    "npz": forged_npz,
    "parquet": forged_parquet,
}
SUFFIXES = {"model": "safetensors", "calibration": "json"}


# --- what is done with a file ---


def is_valid(mean, std):
    assert np.isfinite(mean).all(), mean
    assert np.isfinite(std).all(), std
    assert (np.asarray(std) >= 0).all(), std


def use_model(path, frames):
    from qualms import AtomisticModel
    from qualms.errors import CalibrationError

    model = AtomisticModel.load(path, threads=1)
    model.summary()
    atoms = model.predict(frames, atoms=True).atoms
    for prediction in (model.predict(frames), *atoms):
        is_valid(prediction.mean, prediction.std)
    if model.settings.keep_pp:
        is_valid(*model.predict_pp(frames))
    assert len(model.predict(frames).extrapolates) == len(frames)
    with suppress(CalibrationError):
        model.fitted.with_calibration("auto").compare_calibrations()
    if model.settings.forces:
        prediction = model.predict(frames[:1], forces=True)
        is_valid(prediction.energy.mean, prediction.energy.std)
        is_valid(prediction.forces.mean, prediction.forces.std)


def use_ensemble(calibration, path, output):
    from qualms.ensembles import apply_calibration, read_calibration, read_ensemble
    from qualms.ensembles.calibrate import calibrate_ensemble

    document = read_calibration(calibration)
    ensemble = read_ensemble(path, "e")
    std = document.std(ensemble.std, ensemble.count)
    usable = np.isfinite(ensemble.mean + ensemble.std)
    is_valid(ensemble.mean[usable], std[usable])
    apply_calibration(document, path, output, force=True)
    calibrate_ensemble(ensemble, "student")


def use_frames(path, model):
    from qualms.atomistic.census import take_census
    from qualms.atomistic.structures import read_frames

    frames = read_frames(path)
    prediction = model.predict(frames, unknown_species="ignore")
    is_valid(prediction.mean, prediction.std)
    take_census(frames, model.settings)


def work(kind, first, last, folder):
    """Try some mutations: each prints its number, and how it ended."""
    from qualms import AtomisticModel, QualmsError
    from qualms.atomistic.structures import read_frames

    warnings.simplefilter("ignore")
    suffix = SUFFIXES.get(kind, kind)
    goods = [file.read_bytes() for file in sorted(folder.glob(f"good*.{suffix}"))]
    model = AtomisticModel.load(folder / "good.safetensors", threads=1)
    frames = read_frames(folder / "good.xyz")[:2]
    path, output = (folder / f"{name}-{kind}-{first}.{suffix}" for name in ("bad", "out"))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for number in range(first, last):
        rng = np.random.default_rng([KINDS.index(kind), number])
        forge = FORGED.get(kind, damaged) if rng.random() < 0.7 else damaged
        path.write_bytes(forge(goods[number % len(goods)], rng))
        print(number, end=" ", flush=True)
        signal.alarm(SECONDS)  # ends the process
        try:
            if kind == "model":
                use_model(path, frames)
            elif kind == "calibration":
                use_ensemble(path, folder / "good.npz", folder / f"out-{first}.npz")
            else:
                use_ensemble(folder / "good.json", path, output)
            end = "used"
        except (QualmsError, OSError):
            end = "rejected"
        if kind == "xyz":
            try:
                use_frames(path, model)
            except (QualmsError, OSError):
                end = "rejected"
        signal.alarm(0)
        print(end, flush=True)


# --- the tests ---


@pytest.fixture(scope="module")
def folder(molecules, alloys, tmp_path_factory):
    """Valid files of all kinds."""
    import pandas as pd
    from atomistic_fixtures import copies, make_model

    from qualms.ensembles import read_ensemble, write_calibration
    from qualms.ensembles.calibrate import calibrate_ensemble
    from qualms.ensembles.calibration_file import make_document
    from qualms.io.xyz import xyz_text

    folder = tmp_path_factory.mktemp("fuzz")
    frames = copies(molecules[:24])
    rng = np.random.default_rng(0)
    smooth = {"cutoff": 3.0, "n_radial": 2, "l_max": 1, "smoothing": 0.5}
    for atoms in frames:
        atoms.info = {"e": atoms.info["atomization_energy"]}
        atoms.arrays["f"] = rng.normal(scale=0.1, size=(len(atoms), 3))
        atoms.set_cell([12.0, 12.0, 12.0])
        atoms.pbc = len(atoms) % 2 == 0
    small = {"n_representatives": 12, "n_members": 4, "n_posterior": 3}
    settings = {"": {"representation": smooth, "forces": "f"}, "-2": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, options in settings.items():
            make_model("e", **small, **options).fit(frames).save(folder / f"good{name}.safetensors")
    y = np.array([atoms.info["e"] for atoms in frames])
    members = y[:, None] + rng.normal(scale=0.1, size=(24, 5)) + rng.normal(scale=0.1, size=(24, 1))
    table = {f"e_ensemble_{i}": column for i, column in enumerate(members.T)} | {"REF_e": y}
    np.savez(folder / "good.npz", e_ensemble=members, REF_e=y)
    pd.DataFrame(table).to_csv(folder / "good.csv", index=False)
    pd.DataFrame(table).to_parquet(folder / "good.parquet")
    for atoms, row in zip(frames, members, strict=True):
        atoms.info |= {"e_ensemble": row, "REF_e": atoms.info["e"]}
    (folder / "good.xyz").write_text("".join(map(xyz_text, frames[:6])))
    ensemble = read_ensemble(folder / "good.npz", "e")
    document = make_document(calibrate_ensemble(ensemble, "shrinkage"), ensemble, None)
    write_calibration(document, folder / "good.json")
    return folder


@pytest.mark.parametrize("n", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_end_in_a_result_or_an_error(kind, n, folder):
    first, failures, ends = 0, [], {"used": 0, "rejected": 0}
    while first < n:
        command = [sys.executable, __file__, kind, str(first), str(n), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        *finished, last = [line.split() for line in done.stdout.splitlines()] or [[]]
        if done.returncode or done.stderr:
            failures.append(f"{kind} {last[:1]} {done.returncode}: {done.stderr[-1500:]}")
        for _, end in [*finished, *([last] if len(last) == 2 else [])]:
            ends[end] += 1
        if not last or len(failures) > 20:
            break
        first = int(last[0]) + 1
    assert not failures, "\n\n".join(failures)
    assert sum(ends.values()) == n
    assert min(ends.values()) > 0


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
