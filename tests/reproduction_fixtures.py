"""Results that are made up, to be judged without computing."""

from qualms.reproduce.problems import qm9_settings
from qualms.reproduce.results import Column, Results, Scheme, Seed, Shift, Shifted

SCORES = ("log_likelihood", "mae", "rmse", "coverage_68", "coverage_95", "spearman", "sharpness")
MEMBERS = ("Raw", "CV", "N-L", "Int.", "Int. N-L", "student", "shrinkage")


def column(value=1.0):
    scores = dict.fromkeys(SCORES, 0.5) | {"log_likelihood": value}
    bins = [(0.1 * i, 0.1 * i) for i in range(1, 11)]
    return Column(scores=scores, alpha=1.0, gamma=1.0, decades=1.0, bins=bins, surprises=0.0)


def scheme(n, replace=False, value=1.0):
    columns = {name: column(value + 0.1 * i) for i, name in enumerate(MEMBERS)}
    return Scheme(
        n=n, replace=replace, n_internal=9, seconds=1.0, columns=columns, student_t=value + 1.0
    )


def made_up_seed(number=0, sizes=(10, 50, 100), **update):
    process = {name: column() for name in ("Raw", "CV", "N-L")}
    seed = Seed(
        seed=number,
        n_train=200,
        n_validation=50,
        n_test=50,
        n_environments=1000,
        n_representatives=50,
        noise=0.1,
        seconds={"Members": 1.0},
        schemes=[*(scheme(n, value=1.0 + number) for n in sizes), scheme(200, replace=True)],
        process=process,
    )
    return seed.model_copy(update=update)


def made_up(*seeds, name="qm9", **update):
    results = Results(
        name=name,
        title="Title",
        scale="small",
        source="file",
        units="eV/atom",
        sizes=[10, 50, 100],
        representation=qm9_settings("small").representation.model_dump(mode="json"),
        seeds=list(seeds),
    )
    return results.model_copy(update=update)


def made_up_shift(**update):
    sets = [
        Shifted(label=label, n=9, flagged=0.0, bias=0.0, columns={"student": column()})
        for label in ("at home", "elsewhere")
    ]
    shift = Shift(trained_on="something", n_train=9, sets=sets, seconds=1.0)
    return shift.model_copy(update=update)
