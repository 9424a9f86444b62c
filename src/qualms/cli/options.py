"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Model file (.safetensors).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results only.")]
Json = Annotated[bool, typer.Option("--json", help="Print results as one JSON document.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace existing output.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Cores to use; by default all, or OMP_NUM_THREADS."),
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Same seed, same result.")]
Absent = Annotated[
    str | None,
    typer.Option(
        help="Key of flags, one for each member: it did not see the point. "
        "TARGET_absent by default, if there is one."
    ),
]
Order = Annotated[
    str | None,
    typer.Option(
        help="Members of vectors: member (m0x m0y m0z m1x …) or component (m0x m1x … m0y …). "
        "Found out by default."
    ),
]
