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

Made by `qualms reproduce page` from result files; not typed. Musil, Willatt, Langovoy and Ceriotti,
*Fast and Accurate Uncertainty Estimation in Chemical Machine Learning*, J. Chem. Theory Comput. 15,
906 (2019), on {data}, with

```sh
{commands}
```

Each command says beforehand how long it will take, can be interrupted at any time, and goes on
where it was when it is started again. {scale}
"""

#: What data there are, by scale, and how to come to the other one.
DATA = {"paper": "the same data", "small": "a tenth of the same data"}
SCALES = {
    "paper": "`--scale small` does all of it with a tenth of the data in\nabout a minute.",
    "small": "Without `--scale small` it does all of it with as\nmuch data as the paper.",
}

READING = """
## How to read the tables
All numbers are mean log likelihoods per point (Eq. (6) as a mean): the higher, the better. Error
bars that are right gain 0.01 by being one per cent smaller, and lose 0.01 by being
ten per cent too large or too small. Raw:
the spread of the members as it is. CV, N-L: scaled linearly, or by a power, on a validation set.
Int., Int. N-L: the same, on the training set, each point by at least five members that did not see
it. These five are the paper's. student and shrinkage know that a committee is finite
([theory](theory.md)) and are internal, too; Student's t is the density of student itself, where the
column student has the Gaussian of the same variance. GPR PP: the variance of the projected process,
Eq. (3).
"""

MODEL_SELECTION = """
## How the hyper-parameters were chosen
Once, before these runs, on other divisions of the data and with fewer points: cutoff, width of the
Gaussians, basis, radial scaling and ζ were changed one at a time, on 4,000 molecules of QM9 tested
on 1,000 others, on 200 crystals tested on 50 others, and on 130 crystals with 70 % of their
hydrogen atoms tested on the rest, in a smaller comparison; the tables are in the
[benchmarks](benchmarks.md) (`python -m benchmarks presets siblings`). What was best, within the
noise of one split, is the preset `organic` for molecules and `nmr` for crystals that are new. Where
siblings in the same crystal are known, a longer cutoff, wider Gaussians, a gentler radial scaling
and more principal components are much better, and the division over atoms uses them. The noise σ²
is chosen in each run by leave-one-out errors of the training set alone (over crystals, where they
are what is divided): it never sees a test point, and nor do internal calibrations. The few
hyper-parameters were compared on the same pool of molecules and crystals, divided otherwise, so
that some of the test points here were among those compared on there.
"""

SHIFT = """
## Where it must say "I do not know"
All of the above is for test points like the training points. Here they are not: molecules larger
than any trained on, and crystals relaxed rather than rattled, from another set, computed by others.
Calibrations are internal, from training points, and cannot know of the shift. What is asked is how
far σ rises with the error all the same.
"""

DIFFERENCES = """
## What differs from the paper
- **Half of the rattled crystals.** The paper has 890 rattled structures, of which the public copies
  (CSD-1000R) have 500, with 30,009 hydrogen atoms.{divisions}
- **Rattling.** The paper says root mean squared displacements of 0.25 Å and 0.5 Å. Set against the
  relaxed structures that they come from, atoms of the public files are displaced by 0.025 Å per
  Cartesian component.
- **SOAP hyper-parameters** are not printed in the paper. Ours were chosen by validation (above) and
  stand with each problem. With other features, noise and crystals the log likelihoods themselves
  are others, too; what can be compared is how they differ between columns and sizes.
- **Noise.** How the paper chose σ² is not printed. We take leave-one-out errors, absolute ones,
  which a few odd molecules do not dominate. That is best for the mean; it makes the raw σ of the
  projected process on QM9 far too small, where the paper's is nearly right.
- **Compression.** Features are compressed before representatives are chosen: {compression}.
- **Baseline.** A least-squares composition baseline is part of each member; for shieldings, which
  are of one element, that is its mean.
- **Target of QM9.** The paper says formation energies with zero-point energy; the target here is
  27.2113961 (U₀ − Σ atoms)/n in eV per atom, in which U₀ has the zero-point energy already.
- **Errata.** Eq. (3) lacks σ⁻² in the mean; Eq. (17) needs a factor N; Eq. (6) is a mean and (7),
  (8) are sums: means are reported; Eqs. (13) and (14) drop l in one bra; "slightly more than 50 %"
  of the points absent from at least five of ten half-size sub-samples is 62.3 %.
  [Equations](equations.md) has each.
"""

#: At the paper's scale; at the small one, divisions have little in common.
DIVISIONS = """ Divisions of the data for several seeds take
  {n:,} of the same 30,009: their standard errors are those of divisions, not of data."""

_PANELS = (
    "{title}: P(ln ε | ln σ) of true errors (solid) and of the model (dashed), P(ln σ) in grey, by "
    "size of the sub-samples, and GPR PP; "
)
CAPTIONS = {
    "linear": _PANELS + "scaled linearly on the validation set.",
    "power": _PANELS + "scaled by a power on the validation set.",
    "student": "{title}: the same, student calibration, internal.",
    "sizes": "{title}: log likelihood against sub-sample size; hollow symbols: bootstrap; bars: "
    "standard errors over seeds.",
    "shift": "{title}: error in bins of σ against σ (student); on the dotted line σ is right.",
}
