"""A process that reads uploads and predicts, for the server, which may kill it at any time.

It gets a task as a line of JSON on standard input, followed by the file, and answers with events: a
line of JSON each, followed by content. Uploads are untrusted: their size, their atoms, and the
memory and the time that reading them takes are limited.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import re
import resource
import signal
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import psutil
from ase import Atoms
from ase.data import chemical_symbols

from qualms.arrays import Float64Array
from qualms.atomistic.bulk import Output, Predicted, predict_batches
from qualms.atomistic.evaluation import (
    evaluate,
    find_references,
    nearest_environments,
    notes_on,
    remarks_about,
)
from qualms.atomistic.model import AtomisticModel, summarize
from qualms.atomistic.predictions import not_predicted
from qualms.atomistic.structures import (
    FrameFiles,
    iter_frames,
    read_files,
    readable,
    symbols_of,
)
from qualms.errors import InputError, QualmsError, QualmsWarning, counted
from qualms.io.predictions import EXTRAPOLATES, REASON, open_writer
from qualms.prediction import Prediction
from qualms.serve import LIMITS, MAX_WORKERS

#: Bytes that reading an upload may take, beside the models; all predictions at the same time may
#: take half of those of the machine.
READING_MEMORY = 8 * 10**8
#: Probabilities of intervals.
LEVELS = (68, 95)
#: Structures among which the lowest is of interest.
_MAX_RANKED = 1000
_LAST = len(chemical_symbols) - 1
_DECOMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
Event = tuple[dict[str, Any], bytes]


def main() -> None:
    """Load the models, and run tasks until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to end
    # What libraries print must not come between the events.
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def send(event: dict[str, Any], content: bytes = b"") -> None:
        stdout.write(json.dumps(event | {"size": len(content)}).encode() + b"\n" + content)
        stdout.flush()

    desk: Desk | None = None
    while line := stdin.readline():
        task = json.loads(line)
        content = stdin.read(task.pop("size"))
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("ignore")
                warnings.simplefilter("always", QualmsWarning)
                if desk is None:
                    desk = Desk(**task)
                    send({"event": "result"}, _json(desk.models_document()))
                    continue
                for event, body in desk.run(task, content, caught):
                    send(event, body)
        except QualmsError as error:
            send({"event": "error", "kind": "input", "message": _plain(str(error))})
        except MemoryError:
            send({"event": "error", "kind": "limit", "message": "It needs too much memory."})
        except Exception as error:  # a defect, or a reader of a format that fails in a new way
            sys.stderr.write(f"{error!r}\n")  # without control characters
            message = f"The server failed ({type(error).__name__}); its terminal has the message."
            send({"event": "error", "kind": "defect", "message": message})


class Desk:
    """The models, and the last upload.

    Parameters
    ----------
    models, training : list of str
        Files.
    names : list of str
        Of the models.
    folder : str
        A directory for uploads while they are read.
    threads, baseline, weights
        See `AtomisticModel.load`.
    """

    def __init__(
        self,
        *,
        models: list[str],
        names: list[str],
        training: list[str],
        folder: str,
        threads: int | None,
        baseline: Any,
        weights: str | None,
    ) -> None:
        options = {"threads": threads, "baseline": baseline, "representation": weights}
        self.models = {
            name: AtomisticModel.load(path, **options)
            for name, path in zip(names, models, strict=True)
        }
        self.training: Sequence[Atoms] = []
        if training:
            files = [Path(path) for path in training]
            self.training = FrameFiles.open(files) if readable(files) else read_files(files)[0]
        self.folder = Path(folder)
        self._upload: tuple[str, bytes] = ("", b"")
        self._frames: list[Atoms] = []

    def models_document(self) -> list[dict[str, Any]]:
        """Describe the models."""
        return [
            {
                "name": name,
                "target": model.settings.target,
                "kind": model.settings.kind,
                "units": model.settings.units,
                "elements": symbols_of(model.fitted.representation.species).split(", "),
                "forces": model.fitted.settings.has_forces,
                "force_units": model.settings.units_of("forces"),
                "stress_units": model.settings.units_of("stress"),
                "training": bool(len(self.training)),
                "summary": summarize(model.fitted),
            }
            for name, model in self.models.items()
        ]

    def run(self, task: dict[str, Any], content: bytes, caught: list[Any]) -> Iterator[Event]:
        """Run a task on a file, and yield events; the last is the result."""
        model = self.models[task["model"]]
        name = safe_name(task["name"])
        self._read(name, content)
        yield {"event": "progress", "done": 0, "total": len(self._frames)}, b""
        _limit_memory(psutil.virtual_memory().total // (2 * MAX_WORKERS))
        if task["task"] == "predict":
            yield from self._predict(model, name, task, caught)
        elif task["task"] == "similar":
            document = self._similar(model, task["structure"], task["atom"])
            yield {"event": "result"}, _json(document)
        else:
            yield {"event": "result"}, self._evaluate(model, name, task)

    def _read(self, name: str, content: bytes) -> None:
        """Read the structures of an upload, unless it is the last."""
        if self._upload == (name, content):
            return
        self._upload, self._frames = ("", b""), []
        _limit_memory(READING_MEMORY)
        frames = read_upload(name, content, self.folder)
        self._upload, self._frames = (name, content), frames

    # --- predictions ---

    def _problems(self, model: AtomisticModel) -> dict[int, str]:
        """Return why structures cannot be predicted, by their numbers."""
        reasons = [not_predicted(atoms, model.fitted) for atoms in self._frames]
        return {i: _plain(f"It {reason}.") for i, reason in enumerate(reasons) if reason}

    def _predict(
        self, model: AtomisticModel, name: str, task: dict[str, Any], caught: list[Any]
    ) -> Iterator[Event]:
        problems = self._problems(model)
        usable = [(i, atoms) for i, atoms in enumerate(self._frames) if i not in problems]
        has_volume = any(int(atoms.cell.rank) == 3 for _, atoms in usable)
        forces = model.fitted.settings.has_forces
        output = Output(forces=forces, stress=forces and has_volume, atoms=True)
        if task["format"] != "json":
            if not usable:
                raise InputError(next(iter(problems.values())), parameter="frames")
            content = yield from self._file(model, task["format"], output, usable)
            yield {"event": "result", "name": f"{Path(name).stem}.{task['format']}"}, content
            return
        structures: dict[int, dict[str, Any]] = {
            i: describe(i, self._frames[i]) | {"problem": text} for i, text in problems.items()
        }
        parts: list[Prediction] = []
        for batch in predict_batches(model, usable, output) if usable else ():
            for document in documents_of(model, batch):
                structures[document["index"]] = document
            if not model.fitted.per_atom:
                parts.append(batch.arguments["prediction"].energy)
            done = len(structures) - len(problems)
            yield {"event": "progress", "done": done, "total": len(usable)}, b""
        self._add_references(model, structures)
        ranking = ranked(model, usable, Prediction.concatenate(parts)) if parts else []
        document = {
            "model": task["model"],
            "name": name,
            "target": model.settings.target,
            "kind": model.settings.kind,
            "units": model.settings.units,
            "force_units": model.settings.units_of("forces"),
            "stress_units": model.settings.units_of("stress"),
            "structures": [structures[i] for i in sorted(structures)],
            "ranking": ranking,
            "warnings": sorted({_plain(str(w.message)) for w in caught}),
        }
        yield {"event": "result"}, _json(document)

    def _file(
        self, model: AtomisticModel, suffix: str, output: Output, usable: list[tuple[int, Atoms]]
    ) -> Generator[Event, None, bytes]:
        """Yield progress, and return the file that ``qualms predict`` would write."""
        if suffix == "csv" or model.fitted.per_atom:
            output = Output(forces=output.forces and suffix != "csv")
        kind: Any = "atomic" if model.fitted.per_atom else "structure"
        path, done = self.folder / f"predicted.{suffix}", 0
        with open_writer(
            path, model.settings.target, kind=kind, ensemble=False, force=True
        ) as writer:
            for batch in predict_batches(model, usable, output):
                writer.write(**batch.arguments)
                done += batch.counts["structures"]
                yield {"event": "progress", "done": done, "total": len(usable)}, b""
        content = path.read_bytes()
        path.unlink()
        return content

    def _add_references(self, model: AtomisticModel, structures: dict[int, dict[str, Any]]) -> None:
        """Add reference values of the target, in the units of the data, where there are some."""
        labelled = [i for i, document in structures.items() if "problem" not in document]
        try:
            references = find_references(
                [self._frames[i] for i in labelled],
                model.settings,
                model.fitted.representation.species,
                unknown_species="skip",
            )["energy"]
        except (QualmsError, KeyError):  # there are none, or some that `evaluate` rejects
            return
        for k, y in enumerate(references.y.tolist()):
            document = structures[labelled[int(references.structure[k])]]
            if references.atom is None:
                document["reference"] = y
            else:
                document.setdefault("references", [None] * document["n_atoms"])
                document["references"][int(references.atom[k])] = y

    # --- training environments, scores and reports ---

    def _similar(self, model: AtomisticModel, structure: int, atom: int) -> dict[str, Any]:
        """Return the training environments that are most similar to that of an atom."""
        if not 0 <= structure < len(self._frames):
            raise InputError(f"There is no structure {structure}.", parameter="structure")
        nearest = nearest_environments(model, [self._frames[structure]])[0]
        if atom not in nearest.centers:
            raise InputError(
                f"Atom {atom} of structure {structure} has no environment.", parameter="atom"
            )
        row = nearest.centers.tolist().index(atom)
        note = "Numbers in the training data; qualms serve --training FILE shows these structures."
        similar: list[dict[str, Any]] = [
            {"structure": int(number), "atom": int(other), "similarity": float(similarity)}
            for number, other, similarity in zip(
                *(column[row] for column in nearest[1:]), strict=True
            )
        ]
        if len(self.training):
            note = "Numbers in the training data."
            shown = [self._training_structure(model, **one) for one in similar]
            if None in shown:
                note += " The file of --training is not the one that the model was trained on."
            else:
                similar = [
                    one | {"geometry": geometry}
                    for one, geometry in zip(similar, shown, strict=True)
                ]
        return {"structure": structure, "atom": atom, "similar": similar, "training": note}

    def _training_structure(
        self, model: AtomisticModel, structure: int, atom: int, similarity: float
    ) -> dict[str, Any] | None:
        """Return a structure of the training data; None if these are not the ones of the model."""
        if structure >= len(self.training):
            return None
        atoms = self.training[structure]
        try:
            own = nearest_environments(model, [atoms], 1)[0]
        except InputError:  # it has other elements
            return None
        row = np.flatnonzero(own.centers == atom)
        if not row.size or own.similarity[row[0], 0] < 0.999:
            return None
        return describe(structure, atoms)

    def _evaluate(self, model: AtomisticModel, name: str, task: dict[str, Any]) -> bytes:
        """Return scores and the assessment as JSON, or the report as HTML."""
        from qualms.report.assessment import assess
        from qualms.report.report import make_report
        from qualms.report.structure_map import views_of_model
        from qualms.report.tables import interval_table

        problems = self._problems(model)
        frames = [atoms for i, atoms in enumerate(self._frames) if i not in problems]
        if not frames:
            raise InputError(problems[0], parameter="frames")
        evaluations = evaluate(model, frames, unknown_species="skip")
        if not evaluations:
            message = "No structure has a reference value that can be evaluated."
            raise InputError(message, parameter="frames")
        remarks = remarks_about(model, evaluations)
        if n := len(self._frames) - len(frames):
            left_out = f"{counted(n, 'structure')} that cannot be predicted: left out"
            remarks.append(f"{left_out}; the others are numbered without these.")
        if task["task"] == "report":
            title = f"{model.settings.target}: {task['model']} on {name}"
            report = make_report(
                evaluations,
                title=title,
                facts=summarize(model.fitted),
                remarks=[*notes_on(model), *remarks],
                **views_of_model(model, frames),
            )
            return report.page.encode("utf-8", "backslashreplace")
        quantities = {}
        for quantity, evaluation in evaluations.items():
            assessment = assess(evaluation)
            table = interval_table(assessment.scores, units=evaluation.units)
            quantities[quantity] = {
                "target": evaluation.target,
                "units": evaluation.units,
                "n_points": len(evaluation),
                "assessment": assessment.document(),
                "scores": {"headers": [*table.headers], "rows": [[*row] for row in table.rows]},
            }
        return _json({"quantities": quantities, "remarks": remarks})


# --- reading ---


def safe_name(name: str) -> str:
    """Return the last part of the name of an upload, by which ASE recognises its format."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name.replace("\\", "/").rpartition("/")[2])[-100:]
    return plain.lstrip(".-") or "structures.xyz"


def read_upload(name: str, content: bytes, folder: Path) -> list[Atoms]:
    """Return the structures of an upload, within the limits of atoms.

    Parameters
    ----------
    name : str
        See `safe_name`.
    content : bytes
        It may be compressed.
    folder : path
        Directory for a file while it is read.
    """
    while opened := _DECOMPRESSORS.get(Path(name).suffix.lower()):
        try:
            content = opened(io.BytesIO(content)).read(LIMITS["bytes"] + 1)
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise InputError(f"{name} cannot be decompressed.", parameter="name") from error
        name = Path(name).stem
        if len(content) > LIMITS["bytes"]:
            size = f"{LIMITS['bytes'] / 1e6:g} MB"
            raise InputError(f"{name} is larger than {size}, the limit.", parameter="name")
    frames: list[Atoms] = []
    total = 0
    # Some readers look for further files beside the one that they read.
    with tempfile.TemporaryDirectory(dir=folder) as own, contextlib.chdir(own):
        Path(name).write_bytes(content)
        for atoms in iter_frames(name):
            if len(atoms) and not 0 <= atoms.numbers.min() <= atoms.numbers.max() <= _LAST:
                message = f"Structure {len(frames)} of {name} has an atom of no element."
                raise InputError(message, parameter="name")
            total += max(len(atoms), 1)
            if len(atoms) > LIMITS["atoms"] or total > LIMITS["all_atoms"]:
                most, in_all = LIMITS["atoms"], LIMITS["all_atoms"]
                raise InputError(
                    f"{name} is too large: the limits are {most} atoms in a structure and {in_all} "
                    "in all.",
                    parameter="name",
                )
            frames.append(atoms)
    return frames


def _limit_memory(size: int) -> None:
    """Limit the memory that the process may take from now on, where the system can."""
    used = psutil.Process().memory_info()
    # Linux counts private memory that can be written, other systems the stack or nothing.
    data = getattr(used, "data", used.vms)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (data + size, hard))


# --- documents ---


def describe(index: int, atoms: Atoms) -> dict[str, Any]:
    """Return a structure as a document: Å."""
    finite = np.isfinite(atoms.positions).all()
    has_cell = atoms.pbc.any() and np.isfinite(atoms.cell.array).all() and atoms.cell.rank == 3
    return {
        "index": index,
        "formula": atoms.get_chemical_formula(),  # type: ignore[no-untyped-call]
        "n_atoms": len(atoms),
        "symbols": [*atoms.symbols],
        "positions": atoms.positions.tolist() if finite else [[0.0] * 3] * len(atoms),
        "cell": atoms.cell.array.tolist() if has_cell else None,
    }


def documents_of(model: AtomisticModel, batch: Predicted) -> Iterator[dict[str, Any]]:
    """Yield the predictions of the structures of a batch, a document each."""
    arguments = batch.arguments
    prediction, frames = arguments["prediction"], arguments["frames"]
    target, limits = model.settings.target, intervals_of(prediction.energy)
    atoms_before = centers_before = 0
    for s, atoms in enumerate(frames):
        document = describe(arguments["numbers"][s], atoms)
        document["extrapolates"] = arguments["extra"][EXTRAPOLATES][s]
        document["reasons"] = [r for r in arguments["extra"][REASON][s].split("; ") if r]
        document["novelty"] = float(prediction.novelty[s])
        part = slice(atoms_before, atoms_before := atoms_before + len(atoms))
        arrays = {name: values[part] for name, values in arguments["arrays"].items()}
        columns = {
            "contribution": arrays[f"{target}_atoms"],
            "contribution_uncertainty": arrays[f"{target}_atoms_uncertainty"],
            "novelty": arrays[f"{target}_atoms_novelty"],
        }
        if model.fitted.per_atom:
            rows = arguments["rows"][s]
            some = slice(centers_before, centers_before := centers_before + len(rows))
            columns = {"property": _filled(prediction.mean[some], rows, len(atoms))} | {
                "property_uncertainty": _filled(prediction.std[some], rows, len(atoms)),
                "novelty": columns["novelty"],
            }
            document["atoms_intervals"] = {
                level: _numbers(_filled(np.stack(ends, 1)[some], rows, len(atoms)))
                for level, ends in limits.items()
            }
        else:
            document |= {
                "value": float(prediction.mean[s]),
                "uncertainty": float(prediction.std[s]),
                "intervals": {k: [float(end[s]) for end in ends] for k, ends in limits.items()},
                "ensemble": prediction.members[s].tolist(),
            }
        if "forces" in arrays:
            document["forces"] = arrays["forces"].tolist()
            document["forces_uncertainty"] = arrays["forces_uncertainty"].tolist()
            columns["force_uncertainty"] = arrays[f"{target}_atoms_force_uncertainty"]
        for name, values in arguments["tensors"].items():
            if not np.isnan(values[s]).all():
                document[name] = values[s].tolist()
        document["atoms"] = {name: _numbers(values) for name, values in columns.items()}
        yield document


def intervals_of(prediction: Prediction) -> dict[str, tuple[Float64Array, Float64Array]]:
    """Return conformal intervals, or Gaussian ones where out-of-bag points are too few."""
    limits = {}
    for level in LEVELS:
        known = prediction.conformal
        is_known = known is not None and known.probabilities[-1] >= level / 100
        method = "conformal" if is_known else "gaussian"
        limits[str(level)] = prediction.interval(level / 100, method)
    return limits


def ranked(
    model: AtomisticModel, usable: Sequence[tuple[int, Atoms]], prediction: Prediction
) -> list[dict[str, Any]]:
    """Return structures by increasing value, each with the probability of being the lowest.

    Extensive properties, per atom, of one composition are compared with one another.
    """
    extensive = model.settings.kind == "extensive"
    groups: dict[str, list[int]] = {}
    for row, (_, atoms) in enumerate(usable):
        formula = atoms.symbols.formula.reduce()[0].format("hill") if extensive else ""
        groups.setdefault(formula, []).append(row)
    ranking = []
    for formula, rows in groups.items():
        if not 2 <= len(rows) <= _MAX_RANKED:
            continue
        sizes = np.array([len(usable[r][1]) if extensive else 1 for r in rows], dtype=np.float64)
        some = prediction[np.array(rows)] / sizes
        order, probability = np.argsort(some.mean, kind="stable"), some.lowest()
        ranking.append(
            {
                "formula": formula,
                "per": "atom" if extensive else "",
                "structures": [usable[rows[k]][0] for k in order],
                "probability": probability[order].tolist(),
            }
        )
    return ranking


def _filled(values: Float64Array, rows: Any, n: int) -> Float64Array:
    """Return values of some atoms as values of all, NaN for the others."""
    full = np.full((n, *values.shape[1:]), np.nan)
    full[rows] = values
    return full


def _numbers(values: Float64Array) -> list[Any]:
    """Return a list with None for NaN."""
    with_none: list[Any] = np.where(np.isnan(values), np.array(None), values).tolist()
    return with_none


def _plain(message: str) -> str:
    """Return a message of the library without backticks, for readers of the page."""
    return " ".join(message.replace("`", "").split())


def _json(document: Any) -> bytes:
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


if __name__ == "__main__":
    main()
