"""Made-up results of a reproduction, whose verdicts are known."""

from qualms.reproduce.problems import csd_settings, qm9_settings
from qualms.reproduce.results import Column, Results, Scheme, Seed, Shift, Shifted

#: Columns of members, and of the projected process.
MEMBERS = ("Raw", "CV", "N-L", "Int.", "Int. N-L", "student", "shrinkage")
PROCESS = ("Raw", "CV", "N-L")
SIZES = (10, 50, 100)
SCORES = ("mae", "rmse", "coverage_68", "coverage_95", "spearman", "sharpness")
#: Errors that grow from each bin of σ to the next, and errors that do not.
RISING = [(0.1 * i, 0.1 * i) for i in range(1, 11)]
FLAT = [(0.1 * i, 0.5) for i in range(1, 11)]


def made_column(value=0.0, **update):
    """One estimator of the given log likelihood."""
    scores = dict.fromkeys(SCORES, 0.5) | {"log_likelihood": value} | update.pop("scores", {})
    rest = {"alpha": 1.0, "gamma": 1.0, "decades": 1.0, "bins": RISING, "surprises": 0.0}
    return Column(scores=scores, **rest | update)


def made_scheme(n, values, *, replace=False, n_internal=100, student_t=0.0, **update):
    """Members of one size; log likelihoods by column, 0 where they are not given.

    They are the same about the full model and about the mean of the members.
    """
    columns = {name: made_column(values.get(name, 0.0), **update) for name in MEMBERS}
    return Scheme(
        n=n,
        replace=replace,
        n_internal=n_internal,
        seconds=1.0,
        columns=columns,
        reference={name: columns[name] for name in MEMBERS[:5]},
        student_t=student_t,
    )


def made_seed(number=0, by_column=None, *, bootstrap=None, process=None, sizes=SIZES, **update):
    """A division of the data.

    Log likelihoods are given by column, with one for each size; those of the bootstrap and of the
    projected process by column.
    """
    by_column = by_column or {}
    per_size = update.pop("per_size", [{}] * len(sizes))
    columns = [{c: values[i] for c, values in by_column.items()} for i in range(len(sizes))]
    schemes = [
        made_scheme(n, values, **more)
        for n, values, more in zip(sizes, columns, per_size, strict=True)
    ]
    of_process = update.pop("of_process", {})
    process = {c: made_column((process or {}).get(c, 0.0), **of_process) for c in PROCESS}
    seed = Seed(
        seed=number,
        n_train=200,
        n_validation=50,
        n_test=50,
        n_environments=20_000,
        n_representatives=10_000,
        noise=0.1,
        seconds={"Members": 1.0},
        schemes=[*schemes, made_scheme(200, bootstrap or {}, replace=True)],
        process=process,
    )
    return seed.model_copy(update=update)


def made_results(*seeds, name="qm9", **update):
    """Results at the scale of the paper, of which only the numbers are made up."""
    split = name.removeprefix("csd-")
    of_csd = name.startswith("csd-")
    settings = csd_settings(split, "paper") if of_csd else qm9_settings("paper")
    results = Results(
        name=name,
        title=f"Title of {name}",
        scale="paper",
        source="file",
        units="eV/atom" if name == "qm9" else "ppm",
        sizes=list(seeds[0].sizes),
        representation=settings.representation.model_dump(mode="json"),
        machine=dict.fromkeys(("processor", "cores", "memory", "python"), "unknown"),
        seeds=list(seeds),
    )
    return results.model_copy(update=update)


def plain_scheme(n, *, replace=False, value=1.0):
    """Members of one size, each column 0.1 above the one before."""
    values = {name: value + 0.1 * i for i, name in enumerate(MEMBERS)}
    return made_scheme(n, values, replace=replace, n_internal=9, student_t=value + 1.0)


def plain_seed(number=0, sizes=SIZES, **update):
    """A small division of the data, whose log likelihoods grow with its number."""
    schemes = [plain_scheme(n, value=1.0 + number) for n in sizes]
    rest = {"n_environments": 1000, "n_representatives": 50}
    rest["schemes"] = [*schemes, plain_scheme(200, replace=True)]
    seed = made_seed(number, process=dict.fromkeys(PROCESS, 1.0), sizes=sizes)
    return seed.model_copy(update=rest | update)


def small_results(*seeds, **update):
    """Results at the small scale."""
    representation = qm9_settings("small").representation.model_dump(mode="json")
    rest = {"scale": "small", "units": "eV/atom", "title": "Title", "sizes": list(SIZES)}
    rest |= {"representation": representation, "machine": {}}
    first = seeds or (plain_seed(),)
    return made_results(*first, **rest | {"seeds": list(seeds)} | update)


def made_shift(*sets, **update):
    """A model far from home."""
    found = sets or [
        Shifted(label=label, n=9, flagged=0.0, bias=0.0, columns={"student": made_column(1.0)})
        for label in ("at home", "elsewhere")
    ]
    shift = Shift(trained_on="small things", n_train=100, sets=list(found), seconds=1.0)
    return shift.model_copy(update=update)
