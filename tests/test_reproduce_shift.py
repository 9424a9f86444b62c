"""Where it must say "I do not know": verdicts in words, what survives a shift, and rattling."""

import ase.io
import numpy as np
import pytest
from ase import Atoms
from atomistic_fixtures import organic_crystals, qualms
from reproduce_fixtures import (
    MEMBERS,
    made_column,
    made_shift,
    plain_scheme,
    plain_seed,
    small_results,
)

from qualms.atomistic.training import Resources
from qualms.calibration.base import calibration_data
from qualms.calibration.fitting import fit_calibration
from qualms.cli import reproduce as command
from qualms.features.hypers import make_soap
from qualms.progress import Stages
from qualms.reproduce import problems, session, shift
from qualms.reproduce.bins import adequacy, mean_bins
from qualms.reproduce.introduction import differences
from qualms.reproduce.page import make_page
from qualms.reproduce.problems import csd_settings
from qualms.reproduce.rattling import displacement
from qualms.reproduce.results import Displacement, Shifted, read_results
from qualms.reproduce.shift_page import shift_parts
from qualms.reproduce.survival import survival_words, survivors
from qualms.reproduce.too_small import too_small_parts

SIGMAS = [0.1 * i for i in range(1, 11)]


def bins(**factors):
    """Ten bins with σ = 0.1 … 1.0 that are right but for factors by number: b1=1.5, b10=0.5."""
    return [(s, s * factors.get(f"b{i}", 1.0)) for i, s in enumerate(SIGMAS, start=1)]


def column(pairs=None, likelihood=1.0, coverage=(0.68, 0.95)):
    scores = {"coverage_68": coverage[0], "coverage_95": coverage[1]}
    return made_column(likelihood, scores=scores, bins=pairs or bins())


def a_set(label="far away", n=10_000, **columns):
    return Shifted(label=label, n=n, flagged=0.1, bias=0.0, columns=columns)


def a_seed(student=None, number=0, n_test=10_000):
    schemes = []
    for n in (10, 50, 100, 200):
        scheme = plain_scheme(n, replace=n == 200)
        columns = {name: column() for name in MEMBERS} | {"student": column(student)}
        schemes.append(scheme.model_copy(update={"columns": columns}))
    return plain_seed(number, n_test=n_test, schemes=schemes)


def results(*seeds, name="qm9", **update):
    machine = dict.fromkeys(("processor", "cores", "memory", "python"), "?")
    found = seeds or (a_seed(),)
    return small_results(*found, name=name, **{"units": "eV", "machine": machine} | update)


# --- bins in words ---


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (bins(), "σ is right, within 10%, in all bins"),
        (
            bins(b10=2.12),
            "σ is too small by a factor of 2.12 where it is largest (bin 10, σ 1 eV); elsewhere it "
            "is right within 10%",
        ),
        (
            bins(b9=1.62, b10=2.03),
            "σ is too small by a factor of 1.62 to 2.03 where it is largest (bins 9–10, σ 0.9 to "
            "1 eV); elsewhere it is right within 10%",
        ),
        (
            bins(b1=1.67, b10=0.68),
            "σ is too small by a factor of 1.67 where it is smallest (bin 1, σ 0.1 eV); it is too "
            "large by a factor of 1.47 where it is largest (bin 10, σ 1 eV); elsewhere it is right "
            "within 10%",
        ),
        (
            bins(b2=1.2, b4=1.5, b6=1.3, b8=1.4),
            "σ is too small by a factor of 1.50 in between (bin 4, σ 0.4 eV), 1.40 in between "
            "(bin 8, σ 0.8 eV) and up to 1.30 in 2 more; elsewhere it is right within 10%",
        ),
        (
            [(s, 3 * s) for s in SIGMAS],
            "σ is too small by a factor of 3.00 everywhere (bins 1–10, σ 0.1 to 1 eV)",
        ),
    ],
)
def test_where_error_bars_are_wrong_is_said(pairs, said):
    assert adequacy(pairs, 10_000).describe("eV") == said


def test_too_small_and_too_large_are_judged_alike():
    small, large = adequacy(bins(b3=1.2), 10_000), adequacy(bins(b3=1 / 1.2), 10_000)
    assert small.too_small == large.too_large
    assert not small.too_large
    assert not large.too_small


def test_chance_is_no_verdict():
    """In bins of 40 points, three standard errors of an RMSE are 40 %; in bins of 1,000, 7 %."""
    pairs = bins(b10=1.35)
    assert adequacy(pairs, 10_000).too_small
    assert not adequacy(pairs, 400).too_small
    assert adequacy(bins(b10=1.45), 400).too_small
    rng = np.random.default_rng(0)
    sigma = np.repeat(SIGMAS, 40).reshape(10, 40)
    wrong = 0
    for _ in range(200):
        rmse = np.sqrt(np.mean((rng.normal(size=sigma.shape) * sigma) ** 2, axis=1))
        found = adequacy(list(zip(SIGMAS, rmse, strict=True)), 400)
        wrong += bool(found.too_small or found.too_large)
    assert wrong < 10  # of 200 sets of ten bins that are right


def test_bins_of_several_seeds_are_taken_together():
    mean = mean_bins([bins(b1=1.0), bins(b1=7**0.5), [(1.0, 1.0)]])
    assert mean[0] == pytest.approx((0.1, 0.2))
    assert len(mean) == 10


# --- the page: like the training points ---


def test_the_page_says_where_error_bars_of_test_points_are_too_small():
    found = results(a_seed(bins(b1=1.57, b10=0.28)), a_seed(bins(b1=1.57, b10=0.28), 1))
    text, words, table = too_small_parts([found])
    assert text.strip().startswith("## Where σ is too small")
    assert (
        "student: too small by a factor of 1.57 where it is smallest (bin 1 of 10, σ 0.1 eV), "
        "n = 10; too large by a factor of 3.57 where it is largest (bin 10 of 10, σ 1 eV), n = 10"
    ) in words
    assert "shrinkage: nowhere too small; nowhere too large" in words
    assert "| Title | 50 | 68.0% | 95.0% | 1.57 (bin 1, σ 0.1) | 3.57 (bin 10, σ 1) |" in table
    assert f"{text.strip()}\n\n{words}\n\n{table}" in make_page([found])


# --- the page: far from home ---


def test_the_page_says_where_error_bars_far_from_home_are_too_small():
    home = a_set("at home", student=column(), shrinkage=column(), CV=column())
    far = a_set(
        "8 heavy atoms",
        student=column(bins(b10=2.12), coverage=(0.61, 0.89)),
        shrinkage=column(bins(b10=2.6)),
        CV=column(),
    )
    page = "\n".join(shift_parts([results(shift=made_shift(home, far))], ""))
    assert (
        "- Trained on small things, σ is too small for 8 heavy atoms by a factor of 2.12 where it "
        "is largest (bin 10 of 10, σ 1 eV) with student (others: CV, nowhere to shrinkage, 2.60)."
    ) in page
    assert "**at home** (10,000 points)" in page
    assert "By bins, σ is right, within 10%, in all bins" in page
    assert "By bins, σ is too small by a factor of 2.12 where it is largest" in page
    assert "With shrinkage, σ is too small by a factor of 2.60 where it is largest" in page
    assert "61% of the errors are within the 68 % interval and 89% within the 95 %" in page
    assert "| 1.00, 1.00, 2.12 |" in page


def test_the_page_says_what_the_model_is():
    sets = [a_set(student=column()), a_set(student=column())]
    old = "\n".join(shift_parts([results(shift=made_shift(*sets))], ""))
    assert "Trained on 100 labels of small things; its number of representatives was not" in old
    known = {"n_representatives": 5000, "n_members": 16, "subsample": 0.5, "source": "CSD-2k.xyz"}
    new = made_shift(*sets, **known, representation=make_soap("nmr").model_dump(mode="json"))
    page = "\n".join(shift_parts([results(name="csd-atoms", shift=new)], ""))
    assert (
        "Trained on 100 labels of small things, with 5,000 representatives and 16 members, "
        "sub-samples of one half of the crystals. The relaxed crystals are those of CSD-2k.xyz. "
        "SOAP: cutoff 5 Å, "
    ) in page


def test_one_study_of_crystals_is_shown_and_its_heading_names_the_data():
    sets = [a_set(student=column()), a_set(student=column())]
    old, new = made_shift(*sets, n_train=1), made_shift(*sets, n_train=2, n_representatives=5)
    for shifts in ((old, new), (new, old), (new, new)):
        found = [
            results(name=name, title=name, shift=each)
            for name, each in zip(("csd-atoms", "csd-crystals"), shifts, strict=True)
        ]
        page = "\n".join(shift_parts(found, ""))
        assert page.count("### ") == 1
        assert "### ¹H shieldings: from rattled crystals (CSD-1000R) to relaxed ones" in page
        assert "Trained on 2 labels" in page
        assert page.count("-shift.png") == 1


def test_calibrations_that_were_fitted_to_a_set_are_not_praised_for_it():
    columns = {"student": column(likelihood=1.0), "CV": column(likelihood=9.0)}
    columns["GPR PP"] = column(likelihood=0.0)
    columns["GPR PP, CV"] = column(likelihood=8.0)
    sets = [a_set("home", **columns), a_set("far", **columns)]
    page = "\n".join(shift_parts([results(shift=made_shift(*sets))], ""))
    home, far = page.split("**home**")[1].split("**far**")
    assert "highest log likelihood is student" in home
    assert "highest log likelihood is CV" in far
    assert "| home | CV (fitted to this set) |" in page
    assert "| far | CV |" in page
    assert "| home | GPR PP, CV (fitted to this set) |" in page
    assert "| far | GPR PP, not scaled |" in page


# --- which calibration survives ---


def test_a_calibration_survives_if_its_intervals_hold_on_every_set():
    good, wide, narrow = (0.66, 0.94), (0.80, 0.97), (0.68, 0.90)
    one = a_set("one", CV=column(coverage=good), student=column(coverage=good))
    two = a_set("two", CV=column(coverage=good), student=column(coverage=wide))
    three = a_set("three", CV=column(coverage=narrow), student=column(coverage=good))
    raw = a_set("raw", Raw=column(coverage=good), **{"GPR PP": column(coverage=good)})
    assert survivors([one]) == ["CV", "student"]
    assert survivors([one, two]) == ["CV"]
    assert survivors([two, three]) == []
    assert survivors([raw]) == []
    assert survival_words([raw]) == ""
    each = "CV and student on one; CV on two; student on three"
    assert f"None survives on all of them ({each})." in survival_words([one, two, three])
    assert "CV survives on all of them (CV and student on one; CV on two)." in survival_words(
        [one, two]
    )
    assert "CV and student survive." in survival_words([one])


def test_the_calibration_that_loses_least_and_the_nearest_by_coverage_are_named():
    one = a_set(
        "one",
        Raw=column(likelihood=99.0),
        **{"Int.": column(likelihood=4.79, coverage=(0.74, 0.948))},
        student=column(likelihood=4.75, coverage=(0.67, 0.917)),
    )
    two = a_set(
        "two",
        Raw=column(likelihood=99.0),
        **{"Int.": column(likelihood=-1.25, coverage=(0.875, 0.988))},
        student=column(likelihood=-1.155, coverage=(0.801, 0.969)),
    )
    words = survival_words([one, two])
    assert "By log likelihood, student loses least: at most 0.04 below" in words
    assert "(Int. 0.10)" in words.replace("0.09", "0.10")
    assert "By coverage, student is nearest: its 68% intervals hold 67% to 80%" in words
    assert "its 95% intervals hold 92% to 97%" in words


# --- the study itself ---


@pytest.fixture
def tiny(monkeypatch):
    """A hundredth of the paper."""
    monkeypatch.setitem(problems.DIVISORS, "small", 100)


def crystals(n, seed=0):
    frames = organic_crystals(n, seed=seed)
    for atoms in frames:
        atoms.arrays["shielding"] = atoms.arrays.pop("CS_total")
    return frames


def test_calibrations_of_a_validation_set_are_fitted_at_home_and_judged_far_from_it(
    tiny, tmp_path, monkeypatch
):
    settings = csd_settings("crystals", "small").model_copy(update={"n_representatives": 50})
    means = shift.Means(Resources(1), Stages(), tmp_path / "kernels" / "shift", lambda text: None)
    predicted, predict = [], shift._predicted
    monkeypatch.setattr(
        shift, "_predicted", lambda *args: predicted.append(predict(*args)) or predicted[-1]
    )
    found = shift.csd_shift(crystals(60), crystals(30, seed=1), "small", settings, means)
    assert shift.is_current(found)
    assert not shift.is_current(None)
    assert (found.n_representatives, found.n_members, found.subsample) == (50, 16, 0.5)
    assert found.representation == settings.representation.model_dump(mode="json")
    home, far = found.sets
    assert list(home.columns) == list(far.columns)
    assert set(far.columns) == {*MEMBERS, "GPR PP", "GPR PP, CV", "GPR PP, N-L"}
    for name in ("CV", "N-L", "GPR PP, CV", "GPR PP, N-L"):
        assert home.columns[name].alpha == far.columns[name].alpha
        assert home.columns[name].gamma == far.columns[name].gamma
    # Linear: nothing like it is more likely at home; and it is what the public function fits there.
    expected = fit_calibration(calibration_data(predicted[0].y, predicted[0].members), "linear")
    assert far.columns["CV"].alpha == pytest.approx(expected.alpha)
    for fitted, raw in (("CV", "Raw"), ("GPR PP, CV", "GPR PP"), ("GPR PP, N-L", "GPR PP, CV")):
        likelihoods = [home.columns[name].scores["log_likelihood"] for name in (fitted, raw)]
        assert likelihoods[0] >= likelihoods[1] - 1e-9
    z = predicted[0].y - predicted[0].mean
    alpha = np.sqrt(np.mean((z / predicted[0].std) ** 2))
    assert home.columns["GPR PP, CV"].alpha == pytest.approx(alpha)


def test_the_model_of_relaxed_crystals_does_not_depend_on_the_split(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "draw_figures", lambda *args: [])
    for name, n, seed in (("rattled", 60, 0), ("relaxed", 30, 1)):
        ase.io.write(f"{name}.extxyz", organic_crystals(n, seed=seed), format="extxyz")
    used = []

    def predict(rattled, relaxed, scale, settings, means):
        used.append(settings)
        sets = [a_set("home", student=column()), a_set("far", student=column())]
        return made_shift(*sets, n_representatives=5, digest=shift.digest_of(relaxed))

    monkeypatch.setattr(command, "csd_shift", predict)
    csd = "reproduce csd --data rattled.extxyz --relaxed relaxed.extxyz --scale small --threads 1"
    for split in ("atoms", "crystals"):
        ended = qualms(f"{csd} --split {split} -o {split}")
        assert ended.code == 0, ended.err
    assert used[0] == used[1] == csd_settings("crystals", "small")
    # What is known from one division is not computed again with both.
    assert qualms(f"{csd} --split atoms -o atoms").code == 0
    assert qualms(f"{csd} --split both -o atoms").code == 0
    assert len(used) == 2
    assert read_results("atoms/csd-crystals.json").shift is None
    page = (tmp_path / "atoms" / "reproduction.md").read_text(encoding="utf-8")
    assert page.count("### ¹H shieldings: from rattled") == 1
    # What an earlier version found is made again.
    stored = read_results("atoms/csd-atoms.json")
    old = stored.model_copy(
        update={"shift": stored.shift.model_copy(update={"n_representatives": None})}
    )
    (tmp_path / "atoms" / "csd-atoms.json").write_text(old.model_dump_json())
    ended = qualms(f"{csd} --split atoms -o atoms")
    assert "of an earlier version: they are made again" in ended.err
    assert len(used) == 3


# --- rattling ---


def symmetric(rng, kind):
    """A crystal of four copies of a molecule, in an order of its own: P2₁/c, P2₁2₁2₁, or P-1."""
    cell = {"glide": [8, 9, 10, 90, 105, 90], "screw": [8, 9, 10, 90, 90, 90]}.get(
        kind, [8, 9, 10, 80, 105, 95]
    )
    x = rng.uniform(size=(5, 3))
    copies = {
        "glide": [x, -x, [-1, 1, -1] * x + [0, 0.5, 0.5], [1, -1, 1] * x + [0, 0.5, 0.5]],
        "screw": [
            x,
            [-1, -1, 1] * x + [0.5, 0, 0.5],
            [-1, 1, -1] * x + [0, 0.5, 0.5],
            [1, -1, -1] * x + [0.5, 0.5, 0],
        ],
        "inversion": [x, 0.3 - x],
        "none": [x],
    }[kind]
    atoms = Atoms("CCONH" * len(copies), cell=cell, pbc=True)
    atoms.set_scaled_positions(np.concatenate(copies))
    return atoms[rng.permutation(len(atoms))]


def apart(atoms):
    distances = atoms.get_all_distances(mic=True)
    return distances[np.triu_indices(len(atoms), 1)].min() > 1.2


@pytest.mark.parametrize("kind", ["glide", "screw", "inversion"])
def test_how_far_atoms_were_moved_is_told_by_symmetry(kind):
    rng = np.random.default_rng(1)
    frames = [atoms for _ in range(400) if apart(atoms := symmetric(rng, kind))][:60]
    assert len(frames) >= 30
    assert displacement(frames).rms < 1e-9
    for atoms in frames:
        atoms.positions += rng.normal(scale=0.04, size=atoms.positions.shape)
        atoms.wrap()
    found = displacement(frames)
    assert (found.n, found.of) == (len(frames), len(frames))
    assert found.rms == pytest.approx(0.04, rel=0.08)
    assert found.low < found.rms < found.high


def test_without_symmetry_nothing_is_measured():
    rng = np.random.default_rng(1)
    alone = symmetric(rng, "none")
    assert displacement([alone]) is None
    assert displacement([Atoms("H2", positions=[[0, 0, 0], [0, 0, 1]])]) is None
    assert displacement([]) is None
    known = symmetric(rng, "glide")
    assert displacement([alone, known]).n == 1


def test_the_page_prints_the_rattling_that_was_measured():
    sets = [a_set(student=column()), a_set(student=column())]
    assert "These results do not measure it" in differences([results(shift=made_shift(*sets))])
    measured = {
        "rattled": Displacement(rms=0.0234, low=0.0217, high=0.0242, n=489, of=500),
        "relaxed": Displacement(rms=2.7e-7, low=0.0, high=1e-3, n=1935, of=1948),
    }
    found = results(name="csd-atoms", shift=made_shift(*sets, displacements=measured))
    text = " ".join(differences([found]).split())
    assert "displaced by 0.023 Å per Cartesian component, 0.041 Å per atom" in text
    assert "489 of 500 crystals; nine in ten between 0.022 and 0.024 Å" in text
    assert "of the other set is 3e-07 Å" in text
    assert "{" not in text
