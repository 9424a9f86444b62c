"""What the page says in words that do not depend on a run."""

from __future__ import annotations

#: What pages begin with, by scale.
TITLES = {
    "paper": "# The paper again, at full scale",
    "small": "# The paper again, at a tenth of its scale",
}

#: To be filled by `qualms.reproduce.introduction`, as `DIFFERENCES` is.
INTRODUCTION = """
{title}

Made by `qualms reproduce page` from result files; not typed, except for what does not depend on
them, such as how hyper-parameters were chosen. Musil, Willatt, Langovoy and Ceriotti,
*Fast and Accurate Uncertainty Estimation in Chemical Machine Learning*, J. Chem. Theory Comput. 15,
906 (2019), on {data}, with

```sh
{commands}
```

Each command says beforehand how long it will take, can be interrupted at any time, and goes on
where it was when it is started again. {scale}
"""

#: What data there are, by scale, and how to come to the other one.
DATA = {
    "paper": "its data, as far as they are public",
    "small": "a tenth of as many points",
}
SCALES = {
    "paper": "`--scale small` does all of it with a tenth of the data in\nabout a minute.",
    "small": "Without `--scale small` it does all of it with as\nmuch data as the paper.",
}

READING = """
## How to read the tables
All numbers are mean log likelihoods per point (Eq. (6) as a mean): the higher, the better. Error
bars that are right gain 0.01 by being one per cent smaller, and lose 0.01 by being
ten per cent too large or too small.

Raw: the spread of the members as it is. CV, N-L: scaled linearly, or by a power, on a validation
set. Int., Int. N-L: the same, on the training set, each point by at least five members that did not
see it. These five are the paper's. The first table of each problem has them as the paper does:
about the prediction of the full model, which it calls the reference. A small sub-sample makes a
poor model, but its spread still tells where the full model errs. GPR PP, the variance of the
projected process, Eq. (3), is about the same prediction. The second table has them about the mean
of the members, which is what qualms predicts; student and shrinkage, internal too, are made for it:
they know that a committee is finite ([theory](theory.md)). Student's t is the density of student
itself, where the column student has the Gaussian of the same variance.
"""

MODEL_SELECTION = """
## How the hyper-parameters were chosen
Before these runs, on other divisions of the data and with fewer points: cutoff, width of the
Gaussians, basis, radial scaling and ζ were changed one at a time, on 4,000 molecules of QM9 tested
on 1,000 others, on 200 crystals tested on 50 others, and on 130 crystals with 70 % of their
hydrogen atoms tested on the rest, in a smaller comparison; the tables are in the
[benchmarks](benchmarks.md) (`python -m benchmarks presets siblings`).

For molecules the preset `organic` was kept, with an MAE of 2.456 meV/atom and a log likelihood of
4.508. It is not the best of its table. Better by both scores are a cutoff of 4 Å (2.415 meV/atom,
4.513), 8 radial functions with l ≤ 7 (2.430 meV/atom, 4.518), and cutoffs of 3 Å and 5 Å together
(2.437 meV/atom, 4.512); by log likelihood and RMSE, not by MAE, a cutoff of 6 Å (2.473 meV/atom,
4.519); by RMSE alone, by 7 %, Gaussians of 0.2 Å. That is at most 2 % of the MAE and 0.011 of the
log likelihood, on one division of the data. Differences of this size mean nothing, and that 4 Å and
6 Å both come out above the 5 Å between them says as much. What decided is cost: training takes 17 s
with the preset, 35 s with the larger basis, 60 s with two cutoffs and 30 s with 6 Å. With 4 Å it
takes 20 s, no less: it could as well have been the preset.

For crystals that are new, `nmr` was kept, with an RMSE of 0.631 ppm and a log likelihood of −0.902.
A cutoff of 6 Å is better by every score (0.625 ppm, −0.885), by 1 % of the RMSE. It takes half as
long again, 69 s rather than 46 s, and was left for that.

Where siblings in the same crystal are known, two cutoffs of 4 Å and 7 Å, with wider Gaussians for
the longer one, a gentler radial scaling and more principal components have an RMSE of 0.312 ppm,
17 % less than the 0.374 ppm of `nmr`, and the division over atoms, at the paper's scale, uses them.
A single cutoff of 6 Å or 7 Å comes within 2 % of that. One of 6 Å was used at first. With 20,000
atoms its best N-L was −0.102 ± 0.020, over two divisions of the data, just short of the −0.10 aimed
for; after that several cutoffs were tried. Five more such representations, which the table does not
have, have a larger RMSE; by MAE or log likelihood some are as good, or a little better.

The noise σ² is chosen in each run by leave-one-out errors of the training set alone (over crystals,
where they are what is divided): it never sees a test point, and nor do internal calibrations. The
few hyper-parameters were compared on the same pool of molecules and crystals, divided otherwise, so
that some of the test points here were among those compared on there.
"""

TOO_SMALL = """
## Where σ is too small
Error bars that are right on the whole can be wrong in places. Test points, all of them like the
training points, are put in ten bins of rising σ, as many in each; the root mean squared error of a
bin over its σ is the factor by which σ (student) is too small there, and the inverse of it the one
by which it is too large. Up to 10 %, or three standard errors where there are few points, counts
as right; atoms of one crystal resemble each other, and with them chance does more than that.
"""

SHIFT = """
## Where it must say "I do not know"
All of the above is for test points like the training points. Here they are not: molecules larger
than any trained on, and crystals relaxed rather than rattled, from another set. What is asked is
how far σ rises with the error all the same, and which calibration survives. None of them knows of
the shift: internal ones are from training points; CV, N-L and both of GPR PP are fitted to the
first set, which is held out of the training set and like it. For that set itself they are no test.
Bins of σ are those of the section above. One division of the data, and one model each:
there are no standard errors, and small differences between calibrations mean nothing.
"""

DIFFERENCES = """
## What differs from the paper
- **Half of the rattled crystals.** The paper has 890 rattled structures, of which the public copies
  (CSD-1000R) have 500, with 30,009 hydrogen atoms.{divisions}
- **Rattling.** The paper says root mean squared displacements of 0.25 Å and 0.5 Å.
  {rattling}
- **What σ is put around.** Eq. (4) has y_RS, the mean of the members, and σ_RS about it. The
  paper's scaled columns come out again, but for a constant, only if σ_RS is put around the
  prediction of the full model; its text speaks of "the distribution of predictions about the
  reference". Then scaled log likelihoods hardly depend on the size of the sub-samples, as it says.
  About the mean of the members, of which small sub-samples make a poor prediction, they do.
  Internally, z is the error of the full model without the point, by leave-one-out; over crystals,
  without its crystal. qualms predicts the mean of the members all the same: σ, and the errors that
  it is calibrated on, belong to it. What that costs is accuracy, where sub-samples are small. RMSE
  above that of the full model, by size: {accuracy}.
- **SOAP hyper-parameters** are not printed in the paper. Ours were chosen by validation (above) and
  stand with each problem. With other features, noise and crystals the log likelihoods themselves
  are others, too; what can be compared is how they differ between columns and sizes.
- **Noise.** How the paper chose σ² is not printed. We take leave-one-out errors, absolute ones,
  which a few odd molecules do not dominate. That is best for the mean; it makes the raw σ of the
  projected process on QM9 far too small, where the paper's is nearly right.
- **Compression.** Features are compressed before representatives are chosen. {compression}.
- **Baseline.** A least-squares composition baseline is part of each member; for shieldings, which
  are of one element, that is its mean.
- **Target of QM9.** The paper says formation energies with zero-point energy; the target here is
  27.2113961 (U₀ − Σ atoms)/n in eV per atom, in which U₀ has the zero-point energy already.
- **Errata.** Eq. (3) lacks σ⁻² in the mean; Eq. (17) needs a factor N; Eq. (6) is a mean and (7),
  (8) are sums: means are reported; Eqs. (13) and (14) drop l in one bra; "slightly more than 50 %"
  of the points absent from at least five of ten half-size sub-samples is 62.3 %.
  [Equations](equations.md) has each.
"""

#: How the amplitude of rattling is known: measured with these results, or not.
RATTLED = """
The relaxed structures that the public files come from are not public, but they are symmetric: how
  far the copies of an atom in a cell are from each other's places says how far they were moved. By
  that, and if copies were moved independently, atoms are displaced by {rms:.3f} Å per Cartesian
  component, {atom:.3f} Å per atom (median of {n:,} of {of:,} crystals; nine in ten between
  {low:.3f} and {high:.3f} Å per component). The files are described as displaced by 0.025 Å, a
  little more.
"""
RATTLED_CONTROL = """
The same measure of the relaxed crystals of the other set is {rms:.0e} Å: they are symmetric.
"""
RATTLING_UNKNOWN = """
The public files are described as displaced by 0.025 Å per Cartesian component, ten times less.
  These results do not measure it; those of `qualms reproduce csd` with `--relaxed` do.
"""
#: At the paper's scale; at the small one, divisions have little in common.
DIVISIONS = """ Divisions of the data for several seeds take
  {n:,} of the same 30,009: their standard errors are those of divisions, not of data."""

#: What is said of all figures of a kind, once.
FIGURES = """
## How to read the figures
The paper's figures have P(ln ε | ln σ), the density of errors ε given the error bar σ: that of true
errors solid, that of the model dashed. Contours are at {levels} per unit of ln ε,
where about 20 points or more lie within a bandwidth of ln σ; P(ln σ) in grey, ε = σ dotted. There
is a panel for each size of the sub-samples, with the test points of one seed. GPR PP has no panel
with internal calibration: it has no members, hence none that did not see a training point.

In the figures of log likelihood against sub-sample size, with the bootstrap at the right of each
panel, estimators of one size stand side by side: CV and N-L, calibrated on the validation set, have
large hollow symbols, those with internal calibration small filled ones. They are means over seeds,
with standard errors if there are several. Triangles at the bottom, with their values, are below the
axes. Dotted and dashed, in grey: GPR PP, scaled linearly and by a power on the validation set.
"""

#: Captions, which are the alternative texts as well.
CAPTIONS = {
    "linear": "{title}: P(ln ε | ln σ) about the full model, scaled linearly on the validation set "
    "(CV), and of GPR PP.",
    "power": "{title}: P(ln ε | ln σ) about the full model, scaled by a power on the validation "
    "set (N-L), and of GPR PP.",
    "student": "{title}: P(ln ε | ln σ) about the mean of the members, student calibration, "
    "internal.",
    "sizes": "{title}: log likelihood against sub-sample size; the paper's columns about the full "
    "model, all about the mean of the members.",
    "shift": "{title}: error in bins of σ against σ (student); on the dotted line σ is right.",
}
