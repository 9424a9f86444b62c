"""Members of every size, judged; results are written after each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from qualms.arrays import Float64Array
from qualms.atomistic.memory import Plan
from qualms.atomistic.training import Resources
from qualms.calibration.fitting import internal_points
from qualms.errors import InputError
from qualms.gp.ensemble import committee
from qualms.progress import Stages
from qualms.reproduce.complete import missing, process_lacks, scheme_lacks
from qualms.reproduce.costs import Costs, peak_memory
from qualms.reproduce.kernels import Prepared, discard, prepare
from qualms.reproduce.places import Workplace
from qualms.reproduce.predictions import save_estimates
from qualms.reproduce.problems import Problem
from qualms.reproduce.results import (
    Results,
    Scheme,
    Seed,
    as_column,
    machine,
    read_results,
    write_results,
)
from qualms.reproduce.study import (
    VALIDATED,
    Estimate,
    member_estimates,
    process_estimate,
    reference_estimates,
)

#: What bootstrapping is called beside the sizes of sub-samples.
BOOTSTRAP = "bootstrap"
_ANEW = "Use another directory, or --force to start anew."
#: What announced times are made of: iterations of conjugate gradients, products of N × M × M for
#: errors of points left out, validation and test sets on top of the plan, operations a second.
_ITERATIONS, _LEAVING_OUT, _HELD_OUT, _SPEED = 120, 3.0, 1.2, 4e10


def run_problem(
    problem: Problem,
    results: Results,
    workplace: Workplace,
    resources: Resources,
    stages: Stages,
    say: Callable[[str], None],
) -> Results:
    """Judge members of every size, and a bootstrap, on one division of the data.

    Parameters
    ----------
    problem : Problem
    results : Results
        Those of earlier seeds, and of an interrupted run of this one.
    workplace : Workplace
    resources : Resources
    stages : Stages
    say : callable
        Tells what has been found.
    """
    started = time.perf_counter()
    schemes = _schemes(problem)
    before = results.seed(problem.settings.seed)
    kernels = workplace.kernels(problem.name, problem.settings.seed)
    _check_same_data(problem, results, workplace)
    if before is None or process_lacks(before) or not all(_judged(before, *s) for s in schemes):
        _say_resumed(problem, before, schemes, say)
        with threadpool_limits(limits=resources.threads):
            prepared = prepare(problem, kernels, resources, stages, say)
            seed = before or _new_seed(problem, prepared)
            earlier = prepared.earlier if before is None else Costs(before.wall, before.memory)
            clock = _Clock(started, earlier)
            if process_lacks(seed):
                seed = clock.stamp(_with_process(seed, problem, prepared, workplace))
                results = _written(results, seed, workplace)
            residuals = prepared.solver.left_out_residuals(prepared.settings)
            for n, replace in schemes:
                if not _judged(seed, n, replace):
                    scheme = _judge(problem, prepared, n, replace, residuals, workplace)
                    others = [s for s in seed.schemes if (s.n, s.replace) != (n, replace)]
                    update = {"schemes": [*others, scheme]}
                    seed = clock.stamp(seed.model_copy(update=update))
                    results = _written(results, seed, workplace)
                    say(_line(scheme))
        del prepared
    else:
        say(f"Seed {problem.settings.seed} is complete.")
    if not workplace.keep_kernels:
        discard(kernels)
    return results


def _judged(seed: Seed, n: int, replace: bool) -> bool:
    """Whether members of this size have been judged, in all columns."""
    return any((s.n, s.replace) == (n, replace) and not scheme_lacks(s) for s in seed.schemes)


def _schemes(problem: Problem) -> list[tuple[int, bool]]:
    """Return sizes, and whether they are drawn with replacement."""
    return [(n, False) for n in problem.sizes] + [(_n_groups(problem), True)]


def _say_resumed(
    problem: Problem,
    before: Seed | None,
    schemes: Sequence[tuple[int, bool]],
    say: Callable[[str], None],
) -> None:
    if before is not None:
        judged = sum(_judged(before, *scheme) for scheme in schemes)
        seed = problem.settings.seed
        say(f"Seed {seed} goes on where it was: {judged} of {len(schemes)} sizes are there.")


@dataclass(frozen=True)
class _Clock:
    """Adds time and memory of this process to those of the processes before it."""

    started: float
    earlier: Costs

    def stamp(self, seed: Seed) -> Seed:
        costs = self.earlier.plus(time.perf_counter() - self.started, peak_memory())
        return seed.model_copy(update={"memory": costs.memory, "wall": costs.wall})


def start_results(problem: Problem, workplace: Workplace, *, force: bool) -> Results:
    """Return the results of an earlier run of the same problem, or new ones."""
    fresh = Results(
        name=problem.name,
        title=problem.title,
        scale=problem.scale,
        source=problem.source,
        units=problem.settings.units,
        sizes=list(problem.sizes),
        representation=problem.settings.representation.model_dump(mode="json"),
        machine=machine(),
        left_out=problem.left_out,
    )
    path = workplace.results(problem.name)
    if force or not path.exists():
        return fresh
    before = _read_before(path)
    same = ("name", "scale", "source", "representation")
    differing = [f for f in same if getattr(before, f) != getattr(fresh, f)]
    if differing:
        raise InputError(
            "output",
            f"'{path}'",
            f"results of the same {', '.join(differing)}",
            _ANEW,
        )
    _check_same_data(problem, before, workplace)
    return before


def _read_before(path: Path) -> Results:
    """Read earlier results; if they are damaged, say how to go on all the same."""
    try:
        return read_results(path)
    except InputError as error:
        expected = f"{error.expected} ({error.remedy.rstrip('.')})"
        raise InputError("output", f"'{path}'", expected, _ANEW) from error


def _check_same_data(problem: Problem, results: Results, workplace: Workplace) -> None:
    """Refuse to pass off as new what was found with other structures or labels."""
    before = results.seed(problem.settings.seed)
    if before is not None and before.digest and before.digest != problem.digest:
        raise InputError(
            "output",
            f"'{workplace.results(problem.name)}'",
            f"results of the same data (those of seed {before.seed} have other structures or "
            "labels)",
            _ANEW,
        )


def expected_seconds(problem: Problem, plan: Plan) -> float:
    """Return about how long all sizes take: the plan's time, and all further members.

    A member of n < M points is solved by its n × n matrix; more points by conjugate gradients, all
    members at once, or exactly if that is cheaper: a few times the price of the rows. The full
    model leaves out each point in turn. Factors are those of runs at the paper's scale.
    """
    N, M, R = plan.n_rows, plan.n_representatives, problem.settings.n_members
    flops = _LEAVING_OUT * float(N) * M**2
    for n in [*problem.sizes, N]:
        dual = R * (float(n) ** 2 * M + n**3 / 3)
        flops += min(dual, _ITERATIONS * 4.0 * N * M * R)
    return _HELD_OUT * plan.seconds + flops / _SPEED + 5.0


def seeds_left(results: Results, seeds: int) -> float:
    """Return how many of the first seeds are to be run; of a partial one, the share of its sizes.

    It counts for more than that if its kernel rows were not kept.
    """
    wanted = len(results.sizes) + 1
    left = 0.0
    for seed in range(seeds):
        before = results.seed(seed)
        judged = 0 if before is None else sum(not scheme_lacks(s) for s in before.schemes)
        left += max(1.0 - judged / wanted, 0.0)
    return left


def bytes_left(results: Results, seeds: int, each: float, workplace: Workplace) -> float:
    """Return how many bytes of kernel rows are still to be written for the first seeds.

    Parameters
    ----------
    results : Results
    seeds : int
    each : float
        Bytes of all that is kept of a seed.
    workplace : Workplace
        If it does not keep kernel rows, those of one seed are there at a time.
    """
    left = []
    for seed in range(seeds):
        before = results.seed(seed)
        if before is None or missing(results, before):
            files = workplace.kernels(results.name, seed).rglob("*")
            left.append(max(each - sum(f.stat().st_size for f in files if f.is_file()), 0.0))
    return sum(left) if workplace.keep_kernels else max(left, default=0.0)


def _n_groups(problem: Problem) -> int:
    """Return what a bootstrap draws as many of: structures, or atoms."""
    if problem.settings.resample == "atoms":
        target = problem.settings.target
        return sum(int(np.isfinite(a.arrays[target]).sum()) for a in problem.train)
    return len(problem.train)


def _new_seed(problem: Problem, prepared: Prepared) -> Seed:
    return Seed(
        seed=problem.settings.seed,
        n_train=len(prepared.data.y),
        n_validation=len(prepared.validation.y),
        n_test=len(prepared.test.y),
        n_environments=prepared.data.n_environments,
        n_representatives=len(prepared.fitted.representatives),
        noise=float(prepared.solver.full.noise_variance[0] ** 0.5),
        seconds=prepared.seconds,
        digest=problem.digest,
    )


def _written(results: Results, seed: Seed, workplace: Workplace) -> Results:
    results = results.with_seed(seed)
    write_results(workplace.results(results.name), results)
    return results


def _with_process(seed: Seed, problem: Problem, prepared: Prepared, workplace: Workplace) -> Seed:
    """Judge the projected process."""
    assert prepared.fitted.pp_variance is not None, "the settings keep it"
    # A copy: the factors (r, r) that it makes of its own do not outlive this function.
    fitted = replace(prepared.fitted, pp_variance=replace(prepared.fitted.pp_variance))
    estimates = {"Raw": process_estimate(fitted, prepared.test)}
    for column, method in VALIDATED.items():
        estimates[column] = process_estimate(fitted, prepared.test, prepared.validation, method)
    save_estimates(workplace.predictions(problem.name, seed.seed, "process"), estimates)
    columns = {column: as_column(e) for column, e in estimates.items()}
    return seed.model_copy(update={"process": columns})


def _judge(
    problem: Problem,
    prepared: Prepared,
    n: int,
    replace: bool,
    residuals: Float64Array,
    workplace: Workplace,
) -> Scheme:
    """Draw, solve and calibrate members of one size, and judge them on the test set.

    The residuals are those of training rows by the full model without them.
    """
    settings = prepared.settings.model_copy(update={"subsample": n, "replace": replace})
    started = time.perf_counter()
    outcome = prepared.solver.solve(settings, np.random.default_rng(settings.seed))
    seconds = time.perf_counter() - started
    estimates = member_estimates(outcome.fitted, prepared.validation, prepared.test)
    reference = reference_estimates(outcome, residuals, prepared.validation, prepared.test)
    label = BOOTSTRAP if replace else str(n)
    path = workplace.predictions(problem.name, problem.settings.seed, label)
    save_estimates(path, estimates | reference)
    internal = outcome.internal
    return Scheme(
        n=n,
        replace=replace,
        n_internal=0 if internal is None else len(internal.residuals),
        n_well_judged=0 if internal is None else int(internal_points(internal, "linear").sum()),
        seconds=seconds,
        columns={column: as_column(e) for column, e in estimates.items()},
        reference={column: as_column(e) for column, e in reference.items()},
        student_t=_student_t(estimates),
    )


def _student_t(estimates: Mapping[str, Estimate]) -> float:
    """Return the mean log likelihood under the t density of the student calibration."""
    raw, student = estimates["Raw"], estimates["student"]
    assert raw.members is not None, "raw error bars are those of members"
    spread = committee(raw.members)[1]
    n_members = raw.members.shape[1]
    densities = student.calibration.log_density(raw.y - raw.mean, spread, n_members)
    return float(np.mean(densities))


def _line(scheme: Scheme) -> str:
    """Tell what was found: the paper's columns about the full model, ours about the mean."""
    label = BOOTSTRAP if scheme.replace else f"n = {scheme.n:,}"
    values = ", ".join(
        f"{column} {found.scores['log_likelihood']:.3f}"
        for column, found in (scheme.columns | scheme.reference).items()
    )
    return f"{label}: {values} ({scheme.seconds:.0f} s)"
