"""What Musil et al. 2019 print: mean log likelihoods of test points, by sub-sample size."""

from __future__ import annotations

from collections.abc import Mapping

#: Sub-sample sizes of both tables.
SIZES = (1_000, 5_000, 10_000, 15_000, 18_000)
#: Training, validation and test points of both data sets.
SPLIT = (20_000, 5_000, 5_000)
#: Columns of both tables.
COLUMNS = ("Raw", "CV", "N-L", "Int.", "Int. N-L")
#: The row of the projected process, which has no sub-samples, hence no internal calibration.
PROCESS = "GPR PP"
#: Its columns.
OF_PROCESS = COLUMNS[:3]

Table = Mapping[int | str, tuple[float, ...]]

#: ¹H shieldings of CSD-890-R, ppm.
CSD: Table = {
    1_000: (-0.554, -0.398, -0.356, -0.398, -0.356),
    5_000: (-0.389, -0.381, -0.338, -0.382, -0.337),
    10_000: (-0.952, -0.392, -0.324, -0.407, -0.324),
    15_000: (-4.102, -0.394, -0.312, -0.470, -0.320),
    18_000: (-18.75, -0.412, -0.308, -0.517, -0.351),
    PROCESS: (-8.771, -0.255, -0.251),
}

#: Formation energies of QM9, eV/atom.
QM9: Table = {
    1_000: (4.310, 4.651, 4.647, 4.654, 4.652),
    5_000: (4.655, 4.661, 4.673, 4.658, 4.673),
    10_000: (4.319, 4.670, 4.680, 4.634, 4.665),
    15_000: (2.928, 4.684, 4.690, 4.553, 4.631),
    18_000: (-0.807, 4.681, 4.686, 4.462, 4.568),
    PROCESS: (4.349, 4.374, 4.421),
}


def published(table: Table, row: int | str, column: str) -> float | None:
    """Return what the paper prints, or None where it prints nothing."""
    values = table.get(row, ())
    place = COLUMNS.index(column) if column in COLUMNS else len(COLUMNS)
    return values[place] if place < len(values) else None
