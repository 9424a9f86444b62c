"""What a run will take: where features live, what is said about it, and how progress is told."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from atomistic_fixtures import labelled_molecules, make_model
from hypothesis import given
from hypothesis import strategies as st
from qualms.atomistic.memory import make_plan

from qualms.atomistic import memory as plan
from qualms.atomistic import memory as requirements
from qualms.errors import InputError
from qualms.features.soap import BATCH
from qualms.progress import Stages
from qualms.resources import default_threads, format_bytes, format_time, parse_memory

RUN = {
    "n_rows": 100_000,
    "n_environments": 1_800_000,
    "n_features": 1000,
    "n_raw_features": 2700,
    "n_representatives": 2000,
    "n_members": 16,
    "n_workers": 2,
}
FEATURES = 4.0 * RUN["n_environments"] * RUN["n_features"]


@pytest.fixture
def disk(monkeypatch):
    """A disk with as much room as the test says, and the directories it was asked about."""
    state = SimpleNamespace(free=1e15, asked=[])

    def disk_usage(where):
        state.asked.append(Path(where))
        return SimpleNamespace(free=state.free)

    monkeypatch.setattr(plan.shutil, "disk_usage", disk_usage)
    return state


# --- where features live ---


def test_features_are_kept_then_spilled_then_computed_twice_as_memory_shrinks(disk):
    plenty = make_plan(**RUN, memory="32GB")
    assert plenty.mode == "keep"
    assert plenty.memory > FEATURES
    assert plenty.disk == 0
    tight = make_plan(**RUN, memory="6GB")
    assert tight.mode == "spill"
    assert tight.memory < FEATURES == tight.disk
    disk.free = 1.05 * FEATURES
    twice = make_plan(**RUN, memory="6GB")
    assert twice.mode == "recompute"
    assert twice.disk == 0
    assert twice.seconds > tight.seconds
    assert RUN["n_representatives"] < twice.n_candidates < RUN["n_environments"]
    assert plenty.n_candidates == tight.n_candidates == RUN["n_environments"]


def test_candidates_leave_room_for_what_computes_them(disk):
    disk.free = 0
    made = make_plan(**RUN, memory="6GB")
    kept = 4.0 * made.n_candidates * RUN["n_features"]
    in_flight = RUN["n_workers"] * (requirements._WORKER + 12 * BATCH * RUN["n_raw_features"])
    assert 0.5 * made.limit < kept < made.limit - requirements._BASE - in_flight
    assert kept < made.memory <= made.limit


def test_small_runs_and_many_cores(disk):
    """No process is started for few environments, and no more than fit for many."""
    small = RUN | {"n_environments": 800, "n_rows": 40, "n_representatives": 100}
    one, many = (make_plan(**small | {"n_workers": n}, memory="8GB") for n in (1, 64))
    assert many.memory == one.memory < 1e9
    crowd = make_plan(**RUN | {"n_workers": 64}, memory="6GB")
    assert 1 < crowd.n_workers < 64
    assert crowd.memory <= 6e9


def test_structures_compression_and_cur_are_part_of_the_plan(disk):
    small = RUN | {"n_environments": 20_000, "n_rows": 1000, "n_representatives": 5000}
    made = make_plan(**small, memory="32GB")
    assert make_plan(**small, memory="32GB", n_structures=100_000).memory > made.memory + 3e8
    cur = make_plan(**small, memory="32GB", selection="cur")
    assert cur.memory > made.memory + 8 * 10_000**2
    assert cur.seconds > made.seconds + 20
    wide = make_plan(**small | {"n_raw_features": 20_000}, memory="32GB")
    assert wide.memory > 3 * 8 * 20_000**2


def test_the_disk_that_counts_is_where_features_would_go(disk, tmp_path):
    make_plan(**RUN, memory="6GB", directory=tmp_path)
    assert disk.asked == [tmp_path]


def test_too_little_memory_is_refused_with_what_would_do(disk):
    with pytest.raises(InputError, match=r"memory=500\.0 MB.*at least .* GB") as caught:
        make_plan(**RUN, memory="500MB")
    assert caught.value.parameter == "memory"
    least = caught.value.expected.removeprefix("at least ")
    assert make_plan(**RUN, memory=1.05 * parse_memory(least)).mode == "spill"


def test_a_run_that_can_be_resumed_has_its_features_on_disk(disk):
    assert make_plan(**RUN, memory="32GB", to_disk=True).disk == FEATURES
    assert "on disk" in make_plan(**RUN, memory="32GB", to_disk=True).describe()
    assert make_plan(**RUN, memory="6GB", to_disk=True).mode == "spill"
    disk.free = 0
    for memory in ("32GB", "6GB"):
        with pytest.raises(InputError, match=r"checkpoint=.* free.*--no-checkpoint"):
            make_plan(**RUN, memory=memory, to_disk=True)


@given(
    n_rows=st.integers(2, 1_000_000),
    size=st.integers(1, 50),
    n_features=st.integers(1, 5000),
    n_representatives=st.integers(1, 20_000),
    n_workers=st.integers(1, 16),
    memory=st.floats(4e8, 1e11),
    free=st.sampled_from([0, 1e15]),
)
def test_plans_fit(n_rows, size, n_features, n_representatives, n_workers, memory, free):
    run = {
        "n_rows": n_rows,
        "n_environments": n_rows * size,
        "n_features": n_features,
        "n_raw_features": 3 * n_features,
        "n_representatives": min(n_representatives, n_rows * size),
        "n_members": 16,
        "n_workers": n_workers,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan.shutil, "disk_usage", lambda where: SimpleNamespace(free=free))
        try:
            made = make_plan(**run, memory=memory)
        except InputError:
            return  # too much for this memory
    assert made.memory <= made.limit == memory
    assert made.memory > 8.0 * n_rows * run["n_representatives"]  # the kernel rows
    assert run["n_representatives"] <= made.n_candidates <= run["n_environments"]
    assert made.seconds > 0
    kept = 4.0 * made.n_candidates * n_features
    if made.mode != "spill":
        assert made.memory > kept


def test_a_plan_in_words_and_in_numbers(disk):
    disk.free = 0
    for memory, words in (("32GB", "kept in memory"), ("6GB", "computed twice")):
        made = make_plan(**RUN, memory=memory)
        text = made.describe()
        for fact in (
            words,
            "1,800,000 environments",
            "1,000 features",
            "100,000 labels",
            "2,000 representatives",
            "16 members",
            f"memory {format_bytes(made.memory)} of {format_bytes(parse_memory(memory))}",
            format_bytes(made.model_size),
            format_time(made.seconds),
        ):
            assert fact in text
        assert (f"{made.n_candidates:,} of them" in text) == (made.mode == "recompute")
        assert type(made)(**made.as_dict()) == made
    disk.free = 1e15
    assert "on disk while the run lasts (7.2 GB)" in make_plan(**RUN, memory="6GB").describe()


def test_the_variance_makes_the_file_larger(disk):
    sizes = [make_plan(**RUN, memory="32GB", keep_pp=keep).model_size for keep in (True, False)]
    assert sizes[0] - sizes[1] == 4.0 * RUN["n_representatives"] ** 2


def test_what_compresses_features_is_in_the_file(disk):
    plain, compressed = (
        make_plan(**RUN, memory="32GB", n_projection=n).model_size for n in (0, 2_700_000)
    )
    assert compressed - plain == 4.0 * 2_700_000


@pytest.mark.parametrize("compression", [None, {"n_features": 40}])
def test_a_model_file_is_as_large_as_was_said(compression, tmp_path):
    scales = [{"cutoff": cutoff, "n_radial": 4, "l_max": 3} for cutoff in (3.0, 5.0)]
    several = {"scales": scales, "compression": compression}
    model = make_model(representation=several, n_representatives=60, n_members=4)
    plans = []
    model.fit(labelled_molecules(20), on_plan=lambda plan, _: plans.append(plan))
    model.save(tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    assert plans[0].model_size == pytest.approx(size, abs=1e5)


# --- sizes, times, cores ---


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8GB", 8e9),
        ("500 MB", 5e8),
        ("16GiB", 16 * 2**30),
        (" 1.5 tb ", 1.5e12),
        ("64k", 64e3),
        ("123456", 123456.0),
        (2.5e9, 2.5e9),
        (10**9, 1e9),
    ],
)
def test_sizes_that_are_understood(text, value):
    assert parse_memory(text) == value


@pytest.mark.parametrize(
    "text", ["", "GB", "-3GB", "8GBB", "1.5.2GB", "1,5GB", "lots", "inf", "0", 0, -1, float("nan")]
)
def test_sizes_that_are_not(text):
    with pytest.raises(InputError) as caught:
        parse_memory(text)
    assert caught.value.parameter == "memory"


def test_without_a_limit_most_of_the_machine_is_used():
    assert 0.5 < parse_memory(None) / psutil.virtual_memory().total < 1


@given(n=st.floats(1e-3, 1e15))
def test_sizes_are_said_so_that_they_can_be_read_back(n):
    text = format_bytes(n)
    assert parse_memory(text) == pytest.approx(n, rel=0.06, abs=0.5) if n > 0.5 else text == "0 B"
    assert len(text) <= len("1000.0 MB")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (61, "61 s"), (100, "2 min"), (3600, "60 min"), (2 * 3600, "2.0 h")],
)
def test_times_for_people(seconds, text):
    assert format_time(seconds) == text


def test_threads():
    assert default_threads(3) == 3
    assert default_threads() >= 1
    for threads in (0, -1, 1.5):
        with pytest.raises(InputError) as caught:
            default_threads(threads)
        assert caught.value.parameter == "threads"


# --- progress ---


class Witness:
    def __init__(self):
        self.seen = []

    def begin(self, stage, total):
        self.seen.append((stage, total))

    def advance(self, done):
        self.seen.append(done)

    def end(self, seconds):
        assert seconds >= 0
        self.seen.append("end")


def test_stages_are_shown_and_timed_also_when_they_fail():
    display = Witness()
    stages = Stages(display)
    with stages.stage("one", 10) as advance:
        advance(4)
    with pytest.raises(KeyError), stages.stage("two"):
        raise KeyError
    once = stages.seconds["one"]
    with stages.stage("one", 10) as advance:
        advance(10)
    assert display.seen == [("one", 10), 4, "end", ("two", None), "end", ("one", 10), 10, "end"]
    assert list(stages.seconds) == ["one", "two"]
    assert stages.seconds["one"] > once


def test_nobody_needs_to_watch():
    stages = Stages()
    with stages.stage("one", 3) as advance:
        advance(3)
    assert stages.seconds["one"] > 0
