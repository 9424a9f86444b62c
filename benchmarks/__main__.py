"""Run the benchmarks and write what they measured to benchmarks/RESULTS.md.

python -m benchmarks             # all but the slow ones, which train many or large models
python -m benchmarks selection   # some; the sections of the others are kept
python -m benchmarks paper qm9   # the slow ones
python -m benchmarks forces --labels 20 50   # options are those of this benchmark: see bench_curves
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import time
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path

from threadpoolctl import threadpool_info

#: Where the benchmarks are: module and function, by name, in the order of the results.
BENCHMARKS = {
    "selection": ("bench_selection", "run"),
    "prediction": ("bench_prediction", "run"),
    "atomistic": ("bench_atomistic", "run"),
    "gap": ("bench_gap", "run"),
    "force_costs": ("bench_force_costs", "run"),
    "step": ("bench_step", "run"),
    "forces": ("bench_curves", "run"),
    "force_models": ("bench_forces", "run"),
    "attribution": ("bench_attribution", "run"),
    "presets": ("bench_presets", "run"),
    "siblings": ("bench_presets", "run_siblings"),
    "alloys": ("bench_alloys", "run"),
    "small": ("bench_small", "run"),
    "differences": ("bench_differences", "run"),
    "shift": ("bench_shift", "run"),
    "active": ("bench_active", "run"),
    "audit": ("bench_audit", "run"),
    "active_loop": ("bench_learn", "run"),
    "active_pool": ("bench_active", "run_pool"),
    "active_forces": ("bench_active", "run_forces"),
    "active_until": ("bench_active", "run_until"),
    "paper": ("bench_scale", "run_paper"),
    "qm9": ("bench_scale", "run_qm9"),
    "scale": ("bench_scale", "run_scale"),
    "parquet": ("bench_scale", "run_parquet"),
    "copies3": ("bench_scale", "run_copies3"),
    "copies10": ("bench_scale", "run_copies10"),
    "tables": ("bench_tables", "run"),
    "delta": ("bench_learned", "run_delta"),
    "learned": ("bench_learned", "run"),
    "learned_forces": ("bench_learned", "run_forces"),
    "learned_shift": ("bench_learned", "run_shift"),
}
SLOW = (
    "force_costs",
    "step",
    "forces",
    "force_models",
    "attribution",
    "presets",
    "siblings",
    "alloys",
    "small",
    "differences",
    "shift",
    "active",
    "audit",
    "active_loop",
    "active_pool",
    "active_forces",
    "active_until",
    "paper",
    "qm9",
    "scale",
    "parquet",
    "copies3",
    "copies10",
    "tables",
    "delta",
    "learned",
    "learned_forces",
    "learned_shift",
)
RESULTS = Path(__file__).with_name("RESULTS.md")
HEADER = """# Benchmark results

Written by `make bench`. Speed is a ratio against a peer, or against a bound, measured in the same
run; seconds are beside it for orientation only. Memory is the peak resident set of a process of its
own, and of those that it starts.
"""


def machine() -> str:
    """Describe the machine and the libraries that do the work."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text())
        model = match.group(1) if match else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    blas = {
        f"{lib['internal_api']} {lib['version']} ({lib['num_threads']} threads)"
        for lib in threadpool_info()
        if lib["user_api"] == "blas"
    }
    versions = {d.name: d.version for d in distributions()}
    packages = ", ".join(
        f"{p} {versions[p]}"
        for p in ("numpy", "scipy", "scikit-learn", "skmatter", "dscribe", "featomic", "numba")
        if p in versions
    )
    return (
        f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB; Python {platform.python_version()}, "
        f"{packages}; {', '.join(sorted(blas))}"
    )


def render(name: str, tables: list[dict], seconds: float) -> str:
    """Return one section of the results in Markdown."""
    lines = [f"## {name}", "", f"{datetime.date.today()}, {seconds:.0f} s. {machine()}."]
    for table in tables:
        lines += ["", f"### {table['title']}", ""]
        lines.append("| " + " | ".join(table["columns"]) + " |")
        lines.append("|" + "---|" * len(table["columns"]))
        for row in table["rows"]:
            cells = [f"{c:.3g}" if isinstance(c, float) else str(c) for c in row]
            lines.append("| " + " | ".join(cells) + " |")
        lines += [f"\n{note}" for note in table.get("notes", [])]
    return "\n".join(lines) + "\n"


def sections() -> dict[str, str]:
    """Return the sections that RESULTS.md holds now, by name."""
    if not RESULTS.exists():
        return {}
    parts = re.split(r"^## (\w+)\n", RESULTS.read_text(), flags=re.MULTILINE)[1:]
    return {
        name: f"## {name}\n{text.rstrip()}\n"
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def main() -> None:
    """Run what was asked for, section by section."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"Benchmarks: {', '.join(BENCHMARKS)}. Slow: {', '.join(SLOW)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmark to run")
    given, options = parser.parse_known_args()
    names = given.names or [name for name in BENCHMARKS if name not in SLOW]
    if options and names != ["forces"]:
        parser.error(f"{' '.join(options)}: only `forces` alone has options")
    if unknown := set(names) - set(BENCHMARKS):
        parser.error(f"unknown {', '.join(unknown)}: choose from {', '.join(BENCHMARKS)}")
    results = sections()
    for name in names:
        print(f"{name} …", flush=True)
        start = time.perf_counter()
        module, function = BENCHMARKS[name]
        tables = getattr(import_module(f"benchmarks.{module}"), function)(*options)
        if not tables:  # skipped: what was measured before stays
            continue
        results[name] = render(name, tables, time.perf_counter() - start)
        print(results[name], flush=True)
        ordered = [results[n] for n in BENCHMARKS if n in results]
        RESULTS.write_text(HEADER + "\n" + "\n".join(ordered))


if __name__ == "__main__":
    main()
