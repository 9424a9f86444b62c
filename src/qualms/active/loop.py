"""The active-learning loop: explore, choose, label, train again, and stop.

The state is a directory. What a step found is in a file that appears when it is complete, and a
step whose file exists is not repeated; labels are added to one file as they come. A loop that was
killed therefore goes on from there, and does what it would have done: every step is determined by
the files before it and the seed.

    events.jsonl        what happened, a line for each event
    data.xyz            labels, with the predictions of the model that asked for them
    failed.xyz          structures without labels, and why
    round-000/          model.safetensors, what each walker explored, chosen.xyz

Selected labels are those of structures where the model was uncertain; their errors say nothing
about ordinary structures. Audit labels are drawn at random from what was explored, and measure the
error there without bias. Both test σ: given a structure, selected by what is known before its label
is, its error over σ does not depend on how it was chosen. Models are trained on both.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.stress import voigt_6_to_full_3x3_stress

from qualms.active.audit import coverage, upper_bound
from qualms.active.candidates import clash
from qualms.active.exploration import (
    BEYOND,
    STD,
    TIME,
    Explored,
    bare,
    check_start,
    load_callable,
    look_at,
    walk,
    yielded,
)
from qualms.active.select import Selection, select
from qualms.active.settings import Label, LearnSettings
from qualms.arrays import Float64Array, IntArray
from qualms.atomistic.delta import Result, checked, compute_values, load_calculator
from qualms.atomistic.evaluation import out_of_bag_scores
from qualms.atomistic.labels import find_label, voigt
from qualms.atomistic.model import AtomisticModel
from qualms.atomistic.structures import (
    data_digest,
    fingerprints,
    iter_frames,
    read_files,
    read_frames,
)
from qualms.calibration.sequential import CalibrationTest, calibration_scores, structure_means
from qualms.errors import CalibrationError, InputError, QualmsError, WorkersError, counted, warn
from qualms.evaluation import Evaluation
from qualms.execution import as_workers, processes
from qualms.io.files import append, atomic_output
from qualms.io.xyz import xyz_text
from qualms.metrics import root_mean_square
from qualms.prediction import Prediction

_log = logging.getLogger("qualms")

#: Keys of a bought label: its identity, how it was chosen, and what was predicted before.
ID, KIND, ROUND, REASON = (f"learn_{name}" for name in ("id", "kind", "round", "reason"))
FORCES, FORCES_STD, FORCES_DOF = "learn_forces", "learn_forces_std", "learn_forces_dof"
ENERGY, ENERGY_STD = "learn_energy", "learn_energy_std"
#: Key of the root mean square σ of what was explored in the round.
EXPLORED_STD = "learn_explored_std"
SELECTED, AUDIT = "selected", "audit"
#: Flag of the structure with which a walker goes on; it is the last of its file.
_NEXT, _PICOSECONDS, _STOP = "learn_next", "learn_picoseconds", "learn_stop"
#: Files that a person who computes labels reads and writes.
TO_LABEL, LABELLED = "to_label.xyz", "labelled.xyz"
#: Identity of a structure of the start that is labelled by hand again.
_START = "start{}"
#: Times that a calculation may end with its process, before it is not started again.
_MOST_ATTEMPTS = 5
#: Calculations that are a reason to stop if all of them fail.
_MANY = 3
#: Times σ that an energy is from the prediction, at least, if it is wrong.
_FAR = 10
#: Å by which positions in files of other programs may be rounded.
_ROUNDED = 1e-3
#: Labels of the start and of the calculator may differ by so much of the target error.
_AGREEMENT = 1 / 3


class MissingLabelsError(QualmsError):
    """Structures wait for labels that are computed by hand.

    Parameters
    ----------
    message : str
    path : Path
        The file that has them.
    """

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True)
class Round:
    """A round of the loop, when it is complete.

    Attributes
    ----------
    number : int
    model : AtomisticModel
        Trained on the start and on all labels of the rounds before.
    explored, stops : list of Atoms
        Structures that were explored, and those where walkers stopped.
    bought : list of Atoms
        All labelled structures so far, with the predictions before they were labelled.
    failed : list of Atoms
        Structures whose calculations failed, with the `REASON`.
    records : list of dict
        Numbers of this round and of those before, as they are in the events.
    end : str
        Why the loop ends; an empty text if it goes on.
    target_error : float
    """

    number: int
    model: AtomisticModel
    explored: list[Atoms]
    stops: list[Atoms]
    bought: list[Atoms]
    failed: list[Atoms]
    records: list[dict[str, Any]]
    end: str
    target_error: float

    @property
    def record(self) -> dict[str, Any]:
        """Numbers of this round."""
        return self.records[-1]


def learn(settings: LearnSettings, *, executor: Executor | Any | None = None) -> Iterator[Round]:
    """Run the loop, and yield each round when it is complete.

    Parameters
    ----------
    settings : LearnSettings
    executor : concurrent.futures.Executor or dask.distributed.Client, optional
        Workers that compute labels, instead of those of the settings.

    Raises
    ------
    MissingLabelsError
        If labels are computed by hand, and structures wait for them.
    """
    with _open(settings.folder) as state:
        loop = _Loop(settings, state, executor)
        loop.begin()
        number = max(state.rounds() - 1, 0)
        while True:
            found = loop.round(number)
            yield found
            if found.end:
                return
            number += 1


# --- the directory ---


class _State:
    """The files of a loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        name = "events.jsonl"
        try:
            _drop_incomplete(folder / name, _complete_lines)
            lines = self._text(name).splitlines()
            self.events: list[dict[str, Any]] = [json.loads(line) for line in lines]
            for name in ("data.xyz", "failed.xyz"):
                _drop_incomplete(folder / name, _complete_frames)
        except ValueError as error:
            raise InputError(
                f"{folder / name} has been changed by another program ({error}). Restore it.",
                parameter="directory",
            ) from error

    def _text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def note(self, event: str, **values: Any) -> None:
        """Add an event."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entry = {"event": event, "time": now, **values}
        append(self.folder / "events.jsonl", (json.dumps(entry) + "\n").encode())
        self.events.append(entry)

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the events of a kind."""
        return [entry for entry in self.events if entry["event"] == event]

    def records(self, before: int) -> list[dict[str, Any]]:
        """Return the records of rounds, the last of each."""
        found = {entry["round"]: entry for entry in self.of("round") if entry["round"] < before}
        return [found[number] for number in sorted(found)]

    def round(self, number: int) -> Path:
        """Return the directory of a round."""
        path = self.folder / f"round-{number:03d}"
        path.mkdir(exist_ok=True)
        return path

    def rounds(self) -> int:
        """Return the number of rounds that have begun."""
        return len([*self.folder.glob("round-[0-9][0-9][0-9]*")])

    def add(self, name: str, atoms: Atoms) -> None:
        """Add a structure to a file."""
        append(self.folder / name, xyz_text(atoms).encode())

    def frames(self, name: str) -> list[Atoms]:
        """Return structures that were added, in the order in which they were chosen."""
        path = self.folder / name
        if not path.exists() or not path.stat().st_size:
            return []
        return sorted(read_frames(path), key=lambda atoms: _place(atoms.info[ID]))


def _identity(number: int, rank: int) -> str:
    return f"r{number}s{rank}"


def _place(identity: str) -> tuple[int, int]:
    number, rank = identity[1:].split("s")
    return int(number), int(rank)


def _drop_incomplete(path: Path, complete: Any) -> None:
    """Remove a part that a machine that stopped has left at the end of a file."""
    if path.exists():
        content = path.read_bytes()
        if (size := complete(content)) < len(content):
            os.truncate(path, size)


def _complete_lines(content: bytes) -> int:
    return content.rfind(b"\n") + 1


def _complete_frames(content: bytes) -> int:
    """Return the length of the complete structures at the beginning of extended XYZ."""
    end = 0
    while (line := content.find(b"\n", end)) >= 0:
        place = line
        for _ in range(int(content[end:line]) + 1):
            if (place := content.find(b"\n", place + 1)) < 0:
                return end
        end = place + 1
    return end


@contextmanager
def _open(folder: Path) -> Iterator[_State]:
    """Yield the state in a directory that no other process works in."""
    import fcntl  # Windows has none

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"The `directory` {folder} cannot be made: {error.strerror}.", parameter="directory"
        ) from error
    names = {path.name for path in folder.iterdir()} - {"lock"}
    if names and "events.jsonl" not in names:
        raise InputError(
            f"The `directory` {folder} has other files. Give an empty one, or one that does not "
            "exist.",
            parameter="directory",
        )
    with (folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however
        except OSError as error:
            lock.seek(0)
            raise InputError(
                f"Another loop, process {lock.read().strip()}, works in the `directory` {folder}. "
                "Wait for its end, or give another directory.",
                parameter="directory",
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield _State(folder)


# --- the loop ---


class _Loop:
    """The steps of a round."""

    def __init__(self, settings: LearnSettings, state: _State, executor: Any) -> None:
        self.settings, self.state, self.executor = settings, state, executor
        self.target, self.forces = settings.model.target, str(settings.model.forces)
        self.start, self.places = read_files(settings.start)
        self.seconds: dict[str, float] = {}

    # --- before the first round ---

    def begin(self) -> None:
        """Check the start, note settings that have changed, and compare the calculator."""
        s, state = self.settings, self.state
        labelled = [atoms for atoms in self.start if self._label(atoms) is not None]
        if not labelled:
            raise InputError(
                f"No structure of {', '.join(s.start)} has an energy under {self.target!r} and "
                f"forces under {self.forces!r}. The loop starts from labelled structures.",
                parameter="start",
            )
        if n := len(self.start) - len(labelled):
            warn(
                f"{counted(n, 'structure')} of the start {'has' if n == 1 else 'have'} no energy "
                "or no forces, or they are not finite: left out."
            )
        self.start = labelled
        self._check_explored()
        digest = data_digest(fingerprints(self.start))
        begun = state.of("begin")
        if begun and begun[0]["start"] != digest:
            raise InputError(
                f"The `directory` {s.folder} has a loop with another start. Add structures by "
                "hand to a new start, and give another directory.",
                parameter="start",
            )
        if s.label.potential is not None:
            try:  # a missing package is noticed now
                load_calculator(s.label.potential.model_dump_json())
            except InputError as error:
                error.parameter = "label"
                raise
            if some := self._to_compare():
                self._compare({i: self._compute(bare(self.start[i])) for i in some})
        given = s.model_dump(mode="json")
        if not begun:
            state.note("begin", start=digest, n_start=len(self.start), settings=given)
        else:
            before = [*begun, *state.of("settings")][-1]["settings"]
            if changes := _changes(before, given):
                _log.info("Changed: %s.", "; ".join(changes))
                state.note("settings", settings=given, changes=changes)

    def _check_explored(self) -> None:
        """Reject what cannot be explored, before anything is computed."""
        explore = self.settings.explore
        species = {z for atoms in self.start for z in atoms.numbers.tolist()}
        for number, atoms in enumerate(self._walkers(0)):
            check_start(atoms, number, species)
        for path in explore.pool or ():
            next(iter_frames(path))
        if explore.callable is not None:
            load_callable(explore.callable)

    @property
    def _has_walkers(self) -> bool:
        return self.settings.explore.pool is None and self.settings.explore.callable is None

    def _walkers(self, number: int) -> list[Atoms]:
        """Return where the walkers of a round start."""
        explore = self.settings.explore
        if not self._has_walkers:
            return []
        if number:
            files = [self._walker_file(number - 1, i) for i in range(explore.walkers)]
            known = {i: _read_walker(file).trusted for i, file in enumerate(files) if file.exists()}
        else:
            known = {}
        if explore.structures is not None:
            frames = read_files(explore.structures)[0]
            if not frames:
                raise InputError("`structures` of `explore` are empty.", parameter="explore")
            chosen = [frames[i % len(frames)] for i in range(explore.walkers)]
        else:
            rng = np.random.default_rng([self.settings.seed, 0])
            order = rng.permutation(len(self.start))
            chosen = [self.start[order[i % len(order)]] for i in range(explore.walkers)]
        return [known.get(i) or bare(atoms) for i, atoms in enumerate(chosen)]

    def _to_compare(self) -> list[int]:
        """Return which structures of the start are computed, to compare labels."""
        label = self.settings.label
        if not label.compare or any(e["by"] == self._labeller for e in self.state.of("compared")):
            return []
        rng = np.random.default_rng([self.settings.seed, 1])
        return [int(i) for i in rng.permutation(len(self.start))[: label.compare]]

    @property
    def _labeller(self) -> dict[str, Any]:
        label = self.settings.label
        return {"calculator": label.calculator, "arguments": label.arguments}

    def _compare(self, results: Mapping[int, Result]) -> None:
        """Compare labels of the start with those that are computed, or reject these."""
        by = self.settings.label.calculator or LABELLED
        energies, forces, size = [], [], 0.0
        for i, result in results.items():
            known = self._label(self.start[i])
            assert known is not None
            if isinstance(result, str):
                raise InputError(
                    f"{by} has no values for structure {i} of the start ({result}).",
                    parameter="label",
                )
            energies.append((float(result["energy"]) - known[0]) / len(self.start[i]))
            forces.append(np.ravel(result["forces"] - known[1]))
            size = max(size, root_mean_square(known[1]))
        rmse = root_mean_square(np.concatenate(forces))
        off = root_mean_square(np.array(energies))
        most = _AGREEMENT * self.settings.target_error
        if rmse > most or off > most:  # per atom, and for 1 Å
            what = f"by {rmse:.2g} eV/Å in the forces (of {size:.2g}) and {off:.2g} eV per atom"
            raise InputError(
                f"Labels of the start differ from those of {by} {what} (RMS of "
                f"{counted(len(results), 'structure')}): more than a third of the target error, "
                f"{self.settings.target_error:g} eV/Å. It is another method, or other units, or "
                "the labels have too much noise for this target. Use labels of one method.",
                parameter="label",
            )
        self.state.note("compared", by=self._labeller, forces_rmse=rmse, energy_rmse=off)

    # --- a round ---

    def round(self, number: int) -> Round:
        """Do what is left of a round."""
        s, state, self.seconds = self.settings, self.state, {}
        bought = [a for a in state.frames("data.xyz") if a.info[ROUND] < number]
        model = self._train(number, bought)
        explored = self._explore(number, model, bought)
        frames = [atoms for part in explored for atoms in part.frames]
        stops = [atoms for part in explored for atoms in part.stops]
        if frames and all(BEYOND in atoms.info for atoms in frames):
            warn(
                "All structures that were explored are beyond the limits of `watch`, such as: "
                f"{frames[-1].info[BEYOND]} Limits below the noise of the labels are never kept."
            )
        failed = [a for a in state.frames("failed.xyz") if a.info[ROUND] < number]
        attempts = len(bought) + len(failed)
        record = self._record(number, bought, frames, stops, explored)
        record["bought"] = attempts
        end = self._end(record, attempts, stops, frames)
        _log.info("%s", self._line(record))
        chosen: list[Atoms] = []
        if not end:
            chosen = self._choose(number, model, frames, stops, bought, record, attempts)
            record["next"] = self._next(number, record, chosen)
            if not chosen and stops and self._has_walkers:
                reason = stops[0].info[BEYOND]
                end = f"Walkers do not get away from where they start: {reason}"
            elif not chosen:
                end = "There is nothing left to choose from."
            with self._timed("label"):
                self._buy(number, chosen)
        bought = state.frames("data.xyz")
        test = self._test(number, bought)
        record |= {
            **self._about(number, bought),
            "e_value": test.e_value,
            "alarm": bool(test.alarm),
        }
        if test.alarm:
            warn(
                "Errors of new labels are larger than σ says: the calibration does not hold for "
                "what is explored, nor may the bound."
            )
        record |= {"seconds": {k: round(v, 1) for k, v in self.seconds.items()}, "end": end}
        records = state.records(number)
        done = [e for e in state.of("round") if e["round"] == number]
        if not done or {**done[-1], "seconds": 0, "time": 0} != {
            "event": "round",
            **record,
            "seconds": 0,
            "time": 0,
        }:
            state.note("round", **record)
        return Round(
            number,
            model,
            frames,
            stops,
            bought,
            state.frames("failed.xyz"),
            [*records, record],
            end,
            s.target_error,
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _train(self, number: int, bought: Sequence[Atoms]) -> AtomisticModel:
        """Return the model of a round, always from its file."""
        path, settings = self.state.round(number) / "model.safetensors", self.settings.model
        potential = settings.baseline_potential
        if not path.exists():
            with self._timed("train"):
                model = AtomisticModel.from_settings(settings)
                try:
                    model.fit([*self.start, *bought])
                except CalibrationError as error:
                    raise InputError(
                        f"{counted(len(self.start) + len(bought), 'labelled structure')} are too "
                        f"few for a model with uncertainties. Label more for the start. ({error})",
                        parameter="start",
                    ) from error
                model.save(path)
        confirmed = None
        if potential is not None and potential.calculator is not None:
            confirmed = {"calculator": potential.calculator, "arguments": potential.arguments}
        model = AtomisticModel.load(path, threads=settings.threads, baseline=confirmed)
        if not any(entry["round"] == number for entry in self.state.of("trained")):
            scores = out_of_bag_scores(model, "forces").tolist()
            self.state.note("trained", round=number, scores=scores)
        return model

    # --- explore ---

    def _walker_file(self, number: int, walker: int) -> Path:
        return self.state.round(number) / f"explored-{walker:02d}.xyz"

    def _explore(
        self, number: int, model: AtomisticModel, bought: Sequence[Atoms]
    ) -> list[Explored]:
        """Return the structures that each walker, or another source, reaches in a round."""
        s, explored = self.settings, []
        seed = [s.seed, 2, number]
        walkers = self._walkers(number)
        for i in range(max(len(walkers), 1)):
            path = self._walker_file(number, i)
            if not path.exists():
                with self._timed("explore"):
                    if walkers:
                        found = walk(model, walkers[i], s, i, [*seed, i])
                    elif s.explore.pool is not None:
                        known = set(fingerprints([*self.start, *bought]))
                        failed = self.state.frames("failed.xyz")
                        known |= set(fingerprints([a for a in failed if a.info[ROUND] < number]))
                        pool = (a for path in s.explore.pool for a in iter_frames(path))
                        found = look_at(model, _new(enumerate(pool), known), s)
                    else:
                        made = yielded(model, s, s.seed + number)
                        found = look_at(model, enumerate(made), s)
                    _write_walker(path, found)
            explored.append(_read_walker(path))
        return explored

    # --- how good the model is ---

    def _record(
        self,
        number: int,
        bought: Sequence[Atoms],
        frames: Sequence[Atoms],
        stops: Sequence[Atoms],
        explored: Sequence[Explored],
    ) -> dict[str, Any]:
        """Return the expected error on the explored structures, its bound, and counts."""
        sigma = np.array([atoms.info[STD] for atoms in frames])
        expected = root_mean_square(sigma) if len(sigma) else None
        estimate = bound = None
        audits = [atoms for atoms in bought if atoms.info[KIND] == AUDIT]
        if audits and expected is not None:
            # Labels of all rounds say how many times σ the errors are, each relative to what was
            # explored then.
            of, then = evaluation_of(audits, self.forces), [a.info[EXPLORED_STD] for a in audits]
            errors, std = (_rms(v, of.structure) / then for v in (of.residuals, of.prediction.std))
            estimate = expected * float(np.sqrt(np.sum(errors**2) / np.sum(std**2)))
            bound = expected * upper_bound(errors, std, [1.0])
            bound = bound if np.isfinite(bound) else None
        return {
            "round": number,
            "labels": len(self.start) + len(bought),
            "expected": expected,
            "estimate": estimate,
            "bound": bound,
            "target": self.settings.target_error,
            "explored": len(frames),
            "picoseconds": round(sum(part.picoseconds for part in explored), 6),
            "stops": len(stops),
            "unstopped": round(sum(map(_unstopped, explored)), 6),
        }

    def _about(self, number: int, bought: Sequence[Atoms]) -> dict[str, Any]:
        """Return errors of the labels of a round, as predicted before."""
        about: dict[str, Any] = {}
        for kind in (AUDIT, SELECTED):
            some = [a for a in bought if a.info[KIND] == kind and a.info[ROUND] == number]
            if some:
                of = evaluation_of(some, self.forces)
                shares = coverage(of)
                about[kind] = {
                    "n": len(some),
                    "rmse": root_mean_square(of.residuals),
                    "std": root_mean_square(of.prediction.std),
                    "within_68": shares.within_68,
                    "within_95": shares.within_95,
                }
        return about

    def _test(self, number: int, bought: Sequence[Atoms]) -> CalibrationTest:
        """Return the test of the calibrations, with the labels of all rounds."""
        references = {e["round"]: e["scores"] for e in self.state.of("trained")}
        test = CalibrationTest(references[0])
        for i in range(number + 1):
            # After an alarm, the model has learned what was wrong: a new test begins.
            test = CalibrationTest(references[i]) if test.alarm else test
            test.renew(references[i])
            if labels := [atoms for atoms in bought if atoms.info[ROUND] == i]:
                of = evaluation_of(labels, self.forces)
                test.update(calibration_scores(of.residuals, of.prediction.std, of.structure))
        return test

    def _end(
        self,
        record: Mapping[str, Any],
        attempts: int,
        stops: Sequence[Atoms],
        frames: Sequence[Atoms],
    ) -> str:
        """Return why the loop ends; an empty text if it goes on."""
        s = self.settings
        bound = record["bound"]
        at_most = "" if bound is None else f": at most {bound:.3g} eV/Å (95 %)"
        if bound is not None and bound <= s.target_error and not (self._has_walkers and stops):
            return f"The error is below the target of {s.target_error:g} eV/Å{at_most}."
        if attempts >= s.budget:
            return f"The budget of {counted(s.budget, 'label')} is used up{at_most}."
        if frames or self._has_walkers:
            return ""
        if not record["round"]:
            reason = f": {stops[0].info[BEYOND]}" if stops else "."
            raise InputError(
                f"There are no structures to choose from in `explore`{reason}", parameter="explore"
            )
        return "There is nothing left to choose from."

    def _line(self, record: Mapping[str, Any]) -> str:
        """Return the line that shows the progress."""
        line = f"Round {record['round']}: {record['labels']} labels ({record['bought']} bought)"
        estimate = record["estimate"] if record["estimate"] is not None else record["expected"]
        if estimate is not None:
            line += f", expected error {estimate:.3g} eV/Å"
        if record["bound"] is not None:
            line += f", at most {record['bound']:.3g} (95 %)"
        line += f", target {record['target']:g}"
        if record["picoseconds"]:
            line += f"; {record['unstopped']:.3g} ps without a stop"
            if record["stops"]:
                line += f" of {record['picoseconds']:.3g}, {counted(record['stops'], 'stop')}"
        times = [f"{name} {value:.0f} s" for name, value in self.seconds.items()]
        return line + (f"; {', '.join(times)}" if times else "")

    # --- choose ---

    def _next(
        self, number: int, record: Mapping[str, Any], chosen: Sequence[Atoms]
    ) -> float | None:
        """Return the expected error after the labels of a round."""
        falls = [e["falls_to"] for e in self.state.of("chosen") if e["round"] == number]
        estimate = record["estimate"] or record["expected"]
        if not falls or estimate is None:
            return None
        after: float = falls[-1] * estimate
        _log.info("%s should lower it to %.3g.", counted(len(chosen), "label"), after)
        return after

    def _choose(
        self,
        number: int,
        model: AtomisticModel,
        frames: list[Atoms],
        stops: Sequence[Atoms],
        bought: Sequence[Atoms],
        record: Mapping[str, Any],
        attempts: int,
    ) -> list[Atoms]:
        """Return the structures to label in a round."""
        s, path = self.settings, self.state.round(number) / "chosen.xyz"
        if path.exists():
            return read_frames(path) if path.stat().st_size else []
        with self._timed("choose"):
            n = min(s.batch, s.budget - attempts)
            n_audit = max(ceil(s.audit * n), 1)
            estimate = record["estimate"]
            # Only the confidence is missing; and without selection every label is an audit.
            if s.choose.strategy == "random" or (
                estimate is not None and estimate <= s.target_error
            ):
                n_audit = n
            rng = np.random.default_rng([s.seed, 3, number])
            order = rng.permutation(len(frames)).tolist()
            audit, rest = [frames[i] for i in order[:n_audit]], sorted(order[n_audit:])
            pool = [frames[i] for i in rest]
            # Where walkers stop at once, these are all that there is.
            if len(pool) < n - len(audit) and self._has_walkers:
                pool += [atoms for atoms in stops if not clash(atoms)]
            known = [*self.start, *bought, *audit]
            pool = [atoms for _, atoms in _new(enumerate(pool), set(fingerprints(known)))]
            n_selected = min(n - len(audit), len(pool))
            selected: list[Atoms] = []
            selection: Selection | None = None
            if n_selected > 0:
                try:
                    selection = select(
                        model,
                        pool,
                        n_selected,
                        strategy=s.choose.strategy,
                        targets=frames if s.choose.strategy == "target" else None,
                        labelled=known,
                        max_novelty=s.choose.max_novelty,
                        seed=s.seed,
                    )
                except InputError as error:
                    if error.parameter not in ("pool", "max_novelty"):
                        raise
                    warn(f"Nothing but audits can be labelled. {error}")
                    selection = None
            if selection is not None:
                selected = selection.frames
                if selection.curve is not None and selection.curve[0, 0] > 0:
                    falls = float(selection.curve[-1, 0] / selection.curve[0, 0])
                    self.state.note("chosen", round=number, n=len(selected), falls_to=falls)
            chosen = [*audit, *selected]
            if chosen:
                predicted = model.predict([bare(atoms) for atoms in chosen], forces=True)
                edges = predicted.offsets_of("forces")
            texts = []
            for rank, atoms in enumerate(chosen):
                kind = AUDIT if rank < len(audit) else SELECTED
                marked = bare(atoms, **{k: v for k, v in atoms.info.items() if "learn_" in str(k)})
                marked.info |= {ID: _identity(number, rank), KIND: kind, ROUND: number}
                marked.info[ENERGY] = float(predicted.mean[rank])
                marked.info[ENERGY_STD] = float(predicted.std[rank])
                marked.info[EXPLORED_STD] = record["expected"]
                if predicted.forces.dof is not None and np.isfinite(predicted.forces.dof):
                    marked.info[FORCES_DOF] = float(predicted.forces.dof)
                rows = slice(edges[rank], edges[rank + 1])
                marked.arrays[FORCES] = np.array(predicted.forces.mean[rows])
                marked.arrays[FORCES_STD] = np.array(predicted.forces.std[rows])
                texts.append(xyz_text(marked))
            with atomic_output(path, mode="w") as file:
                file.write("".join(texts))
        return read_frames(path) if texts else []

    # --- label ---

    def _label(self, atoms: Atoms) -> tuple[float, Float64Array] | None:
        """Return the energy and the forces of a structure that has both."""
        energy = find_label(atoms, self.target, False)
        forces = find_label(atoms, self.forces, True)
        if energy is None or forces is None:
            return None
        E, F = float(np.asarray(energy[0])), np.asarray(forces[0], dtype=np.float64)
        is_right = F.shape == (len(atoms), 3) and np.isfinite(E) and np.isfinite(F).all()
        return (E, F) if is_right else None

    def _buy(self, number: int, chosen: Sequence[Atoms]) -> None:
        """Label what has no label yet."""
        state, label = self.state, self.settings.label
        done = {a.info[ID] for name in ("data.xyz", "failed.xyz") for a in state.frames(name)}
        missing = [atoms for atoms in chosen if atoms.info[ID] not in done]
        if label.potential is None:
            self._by_hand(number, chosen, missing)
            return
        attempts: dict[str, int] = {}
        for entry in state.of("computing"):
            attempts[entry["id"]] = attempts.get(entry["id"], 0) + 1
        tasks = []
        for atoms in missing:
            if attempts.get(atoms.info[ID], 0) >= _MOST_ATTEMPTS:
                self._store(atoms, f"the process ended during it, {_MOST_ATTEMPTS} times")
            else:
                tasks.append(atoms)
        stored = set[str]()
        try:
            for atoms, result in self._results(tasks):
                self._store(atoms, result)
                stored.add(atoms.info[ID])
        except WorkersError:
            if self.executor is not None:
                raise
            # One at a time, the calculation that ends its process is known.
            for atoms in tasks:
                if atoms.info[ID] not in stored:
                    self._store(*self._alone(atoms))
        failed = {a.info[ID]: a.info[REASON] for a in state.frames("failed.xyz")}
        reasons = [failed.get(atoms.info[ID]) for atoms in chosen]
        if missing and len(chosen) >= _MANY and all(reasons):
            raise InputError(
                f"All {len(chosen)} calculations of round {number} failed, the last with: "
                f"{reasons[-1]}. Find the cause; the same command then goes on with other "
                "structures.",
                parameter="label",
            )

    def _alone(self, atoms: Atoms) -> tuple[Atoms, Result]:
        """Return a structure and its label, or that its calculation ends the process."""
        try:
            ((_, result),) = self._results([atoms])
        except WorkersError:
            return atoms, "the process ended during it"
        return atoms, result

    def _compute(self, atoms: Atoms) -> Result:
        assert self.settings.label.potential is not None
        text = self.settings.label.potential.model_dump_json()
        return _compute(atoms, text, self.settings.model.stress is not None)

    def _results(self, tasks: Sequence[Atoms]) -> Iterator[tuple[Atoms, Result]]:
        """Yield structures and their labels, as they are computed."""
        label = self.settings.label
        if self.executor is None and label.workers == 1:
            for atoms in tasks:
                self.state.note("computing", id=atoms.info[ID])
                yield atoms, self._compute(atoms)
            return
        assert label.potential is not None
        arguments = label.potential.model_dump_json(), self.settings.model.stress is not None
        executor = self.executor or processes(label.workers)

        def noted() -> Iterator[Atoms]:
            for atoms in tasks:
                self.state.note("computing", id=atoms.info[ID])
                yield atoms

        yield from as_workers(executor).unordered(_compute, noted(), *arguments)

    def _store(self, atoms: Atoms, result: Result) -> None:
        """Add a label to the data, or a failure to the list of them."""
        labelled: Atoms = atoms.copy()  # type: ignore[no-untyped-call]
        result = _sensible(result, atoms, self.settings.label)
        if isinstance(result, str):
            labelled.info[REASON] = result
            self.state.add("failed.xyz", labelled)
            self.state.note("failed", id=atoms.info[ID], reason=result)
            warn(f"The label of {atoms.info[ID]} ({atoms.symbols}) failed: {result}.")
            return
        keys = self._keys()
        labelled.info[keys["energy"]] = float(result["energy"])
        labelled.arrays[keys["forces"]] = np.asarray(result["forces"])
        if "stress" in result and "stress" in keys:
            # As a matrix: under "stress" ASE writes six numbers that it cannot read.
            labelled.info[keys["stress"]] = voigt_6_to_full_3x3_stress(result["stress"])  # type: ignore[no-untyped-call]
        self.state.add("data.xyz", labelled)
        self.state.note("labelled", id=atoms.info[ID])

    def _keys(self) -> dict[str, str]:
        """Return the keys of labels, where those of the start are."""
        keys = {}
        for name, key in self.settings.model.keys.items():
            of_atoms = name == "forces"
            places = (find_label(atoms, key, of_atoms) for atoms in self.start)
            place = next((hit[1] for hit in places if hit is not None), "")
            keys[name] = f"REF_{key}" if f"'REF_{key}'" in place else key
        return keys

    def _by_hand(self, number: int, chosen: Sequence[Atoms], missing: Sequence[Atoms]) -> None:
        """Take labels from the file of a person, or ask for them."""
        folder = self.state.folder
        asked, given = folder / TO_LABEL, folder / LABELLED
        some = self._to_compare()
        again = {_START.format(i): bare(self.start[i]) for i in range(len(self.start))}
        if missing and not given.exists():
            wanted = [(_START.format(i), self.start[i]) for i in some]
            wanted += [(a.info[ID], a) for a in missing]
            with atomic_output(asked, force=True, mode="w") as file:
                # Without predictions, which other programs might take for something else.
                file.write("".join(xyz_text(bare(a, **{ID: name})) for name, a in wanted))
            raise MissingLabelsError(
                f"{counted(len(wanted), 'structure')} of {asked} wait for labels: write them, "
                f"with {self.target!r} (eV) and {self.forces!r} (eV/Å), to {given}, and run the "
                "same command again. Structures that are left out are listed as failed."
                + (f" The first {len(some)}, of the start, are compared." if some else ""),
                asked,
            )
        if missing:
            names = {atoms.info[ID]: atoms for atoms in chosen}
            results = self._read_by_hand(given, again | names)
            if all(isinstance(result, str) for result in results.values()):
                raise InputError(
                    f"No structure of {given} has {self.target!r} and {self.forces!r} that are "
                    "finite.",
                    parameter="label",
                )
            compared = {i: results[name] for i in some if (name := _START.format(i)) in results}
            if compared:
                self._compare(compared)
            elif some:
                warn(
                    f"{given} has no structure of the start: whether the labels agree with those "
                    "of the start is not known."
                )
            for atoms in missing:
                identity = atoms.info[ID]
                self._store(atoms, results.get(identity, f"it is not in {LABELLED}"))
        if given.exists():
            given.rename(self.state.round(number) / LABELLED)
        asked.unlink(missing_ok=True)

    def _read_by_hand(self, path: Path, names: Mapping[str, Atoms]) -> dict[str, Result]:
        """Return the labels of a file, by the names of structures that may be there."""
        results: dict[str, Result] = {}
        for i, atoms in enumerate(read_frames(path)):
            name = atoms.info.get(ID)
            some = names if name is None else {name: names[name]} if name in names else {}
            match = next((key for key, a in some.items() if _is_same(a, atoms)), None)
            if match is None:
                raise InputError(
                    f"Structure {i} of {path} is none of those of {TO_LABEL}: keep elements, their "
                    f"order, positions and cell{'' if name is None else f', and {ID}'}.",
                    parameter="label",
                )
            label = self._label(atoms)
            if label is None:
                result: Result = f"no {self.target!r} and {self.forces!r}, or not finite"
            else:
                result = {"energy": np.asarray(label[0]), "forces": label[1]}
                stress = self.settings.model.stress
                if stress is not None and (hit := find_label(atoms, stress, False)):
                    result["stress"] = voigt(*hit)
            results[match] = result
        return results


def _compute(atoms: Atoms, text: str, stress: bool) -> Result:
    """Return the label of a structure, or why there is none; on a worker, perhaps."""
    names = {"energy", "forces"} | ({"stress"} if stress and atoms.cell.rank == 3 else set())
    (result,) = compute_values(([bare(atoms)], [names]), text)
    return checked(result, atoms, names)


def _sensible(result: Result, atoms: Atoms, label: Label) -> Result:
    """Return a label, or that it is nonsense."""
    if isinstance(result, str):
        return result
    largest = float(np.linalg.norm(result["forces"], axis=1).max())
    if largest > label.max_force:
        return f"a force of {largest:.3g} eV/Å, more than max_force ({label.max_force:g})"
    energy, std = (atoms.info[key] for key in (ENERGY, ENERGY_STD))
    error = abs(float(result["energy"]) - energy)
    if error > max(label.max_energy * len(atoms), _FAR * std):
        return (
            f"an energy {error / len(atoms):.3g} eV per atom from the prediction, more than "
            f"max_energy ({label.max_energy:g})"
        )
    return result


def evaluation_of(labels: Sequence[Atoms], forces: str) -> Evaluation:
    """Return the forces of labels, with the predictions before they were bought.

    Parameters
    ----------
    labels : sequence of Atoms
        Of `Round.bought`.
    forces : str
        Their key.
    """
    found = [find_label(atoms, forces, True) for atoms in labels]
    y = [np.asarray(label[0], dtype=np.float64).ravel() for label in found if label is not None]
    mean, std = (
        np.concatenate([atoms.arrays[key].ravel() for atoms in labels])
        for key in (FORCES, FORCES_STD)
    )
    dof, sizes = labels[-1].info.get(FORCES_DOF), [len(atoms) for atoms in labels]
    return Evaluation(
        target=forces,
        quantity="forces",
        y=np.concatenate(y),
        prediction=Prediction(mean=mean, std=std, dof=None if dof is None else float(dof)),
        structure=np.repeat(np.arange(len(labels)), 3 * np.array(sizes)),
        atom=np.repeat(np.concatenate([np.arange(n) for n in sizes]), 3),
        component=np.tile(np.arange(3), sum(sizes)),
        component_names=("x", "y", "z"),
        units="eV/Å",
        frames=[bare(atoms, config_type=str(atoms.info[KIND])) for atoms in labels],
        warnings=(),
    )


def _rms(values: Float64Array, structure: IntArray) -> Float64Array:
    """Return the root mean square of each structure."""
    return np.asarray(np.sqrt(structure_means(np.square(values), structure)))


def _unstopped(explored: Explored) -> float:
    """Return the time in ps of a walker since it was stopped for the last time."""
    return explored.picoseconds - max(
        (a.info[TIME] for a in explored.stops if TIME in a.info), default=0.0
    )


def _is_same(one: Atoms, other: Atoms) -> bool:
    """Return whether structures are the same, up to the rounding of files."""
    if len(one) != len(other) or not np.array_equal(one.numbers, other.numbers):
        return False
    cells = [np.asarray(atoms.cell) * atoms.pbc[:, None] for atoms in (one, other)]
    return bool(
        np.abs(one.positions - other.positions).max() < _ROUNDED
        and np.abs(cells[0] - cells[1]).max() < _ROUNDED
    )


def _new(frames: Iterable[tuple[int, Atoms]], known: set[bytes]) -> Iterator[tuple[int, Atoms]]:
    """Yield structures that are not known."""
    for number, atoms in frames:
        if fingerprints([atoms])[0] not in known:
            yield number, atoms


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], name: str = "") -> list[str]:
    """Return the differences between two sets of settings, as text."""
    changes = []
    for key in [*now, *(key for key in before if key not in now)]:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += _changes(old, new, f"{name}{key}.")
        elif old != new:
            changes.append(f"{name}{key} from {old} to {new}")
    return changes


def _write_walker(path: Path, explored: Explored) -> None:
    """Write the structures that a walker explored."""
    frames = [*explored.frames]
    for atoms in explored.stops:
        atoms.info[_STOP] = True
        frames.append(atoms)
    last = Atoms() if explored.trusted is None else bare(explored.trusted)
    last.info |= {_NEXT: True, _PICOSECONDS: explored.picoseconds}
    with atomic_output(path, mode="w") as file:
        file.write("".join(map(xyz_text, [*frames, last])))


def _read_walker(path: Path) -> Explored:
    """Return the structures that a walker explored."""
    *frames, last = read_frames(path)
    stops = [atoms for atoms in frames if atoms.info.get(_STOP)]
    return Explored(
        [atoms for atoms in frames if not atoms.info.get(_STOP)],
        stops,
        bare(last) if len(last) else None,
        float(last.info[_PICOSECONDS]),
    )
