"""The command in terminals and file systems of all kinds: encodings, signals, pipes."""

import io
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from test_cli import SMALL_RUN, Ended, qualms

from qualms import AtomisticModel
from qualms.atomistic.structures import FrameFiles, divided
from qualms.cli.app import main
from qualms.cli.terminal import Terminal, naming_files, with_files
from qualms.report import Table

#: A name that is not UTF-8: in Latin-1 it would be "größe".
NAME = os.fsdecode(b"gr\xf6\xdfe")
COMMAND = [sys.executable, "-m", "qualms"]
ESCAPES = "\x1b[2J\x07\x9b31m\x7f\r"


# --- output ---


def run(*arguments, encoding="utf-8"):
    """Run a command in this process, with streams that reject what they cannot encode."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding, write_through=True) for _ in range(2)]
    code = 0
    with (
        patch.object(sys, "argv", ["qualms", *arguments]),
        patch.object(sys, "stdout", streams[0]),
        patch.object(sys, "stderr", streams[1]),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return Ended(
        code, *(stream.buffer.getvalue().decode(encoding, "replace") for stream in streams)
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_terminals_that_are_not_utf8(desk, encoding):
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([*COMMAND, "--help"], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    for command in ("train --help", "info model.safetensors", "evaluate model.safetensors new.xyz"):
        ended = run(*command.split(), encoding=encoding)
        assert ended.code == 0
        assert ended.out
    ended = run("info", "Größe→.safetensors", encoding=encoding)
    assert ended.code == 2
    assert ended.err.startswith("Error: ")


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-"])
def test_closed_streams(desk, closed):
    command = f"{shlex.join(COMMAND)} predict model.safetensors new.xyz -o new.csv {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0
    assert ("100 structures" in done.stdout) == (">&- 2>&-" not in closed)
    assert Path("new.csv").read_text().count("\n") == 101


def test_control_characters_are_escaped(capsys):
    terminal = Terminal()
    terminal.info(f"one {ESCAPES}\ttwo\nthree")
    terminal.result(ESCAPES, Table([ESCAPES], [[ESCAPES]], title=ESCAPES), document={})
    terminal = Terminal(as_json=True)
    terminal.result(document={ESCAPES: ESCAPES})
    out, err = capsys.readouterr()
    assert "one \\x1b[2J\\x07\\x9b31m\\x7f\\x0d" in err
    assert "two\nthree" in err
    for text in (out, err):
        assert "\\x1b[2J" in text
        assert not {"\x1b", "\x07", "\x9b", "\r"} & {*text}


def test_control_characters_of_files_and_names_do_not_reach_the_terminal(desk):
    fitted = AtomisticModel.load("model.safetensors").fitted
    record = fitted.record.model_copy(update={"preset": f"odd{ESCAPES}"})
    AtomisticModel.from_fitted(replace(fitted, record=record)).save("odd.safetensors")
    for command in ("info odd.safetensors", "info", "predict"):
        arguments = ["new.xyz", "-o", "new.csv"] if command == "predict" else []
        name = [f"nothing{ESCAPES}"] if " " not in command else []
        ended = qualms(command, *map(shlex.quote, name), *arguments)
        assert ended.code == (0 if " " in command else 2), ended.err
        assert not {"\x1b", "\x07", "\x9b", "\x7f"} & {*ended.out, *ended.err}
        assert "\\x1b" in ended.out + ended.err


# --- names of files ---


def test_names_that_are_not_utf8(desk):
    try:
        Path(f"{NAME}.safetensors").symlink_to("model.safetensors")
    except OSError:
        pytest.skip("This file system has names in UTF-8 alone.")
    Path(f"{NAME}.xyz").symlink_to("new.xyz")
    Path(f"{NAME}.npz").symlink_to("members.npz")
    Path(f"{NAME}.yaml").write_text(yaml.safe_dump(SMALL_RUN))
    commands = [
        "info {}.safetensors",
        "predict {0}.safetensors {0}.xyz -o {0}.csv",
        "predict {0}.safetensors {0}.xyz -o {0}.parquet",
        "evaluate {0}.safetensors {0}.xyz",
        "report {0}.safetensors {0}.xyz -o {0}.html",
        "evaluate {0}.npz --target e",
        "report {0}.npz --target e -o {0}2.html",
        "calibrate {0}.npz --target e -o {0}.json --report {0}3.html",
        "apply {0}.json {0}.npz --target e -o {0}3.npz",
        "train {0}.xyz --config {0}.yaml -o {0}4.safetensors",
        "info missing{}.safetensors",
        "predict {0}.safetensors missing{0}.xyz -o {0}5.csv",
    ]
    for command in commands:
        ended = run(*command.format(NAME).split())
        assert ended.code == (2 if "missing" in command else 0), (command, ended.err)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("Structure 1 contains Cu.", "Structure 3 of new.xyz contains Cu."),
        ("Outliers: structure 1 (Ag4).", "Outliers: structure 3 of new.xyz (Ag4)."),
        (
            "The label frames[1].info['e'] is 'x'.",
            "The label 'e' of structure 3 of new.xyz is 'x'.",
        ),
        ("Structure 3 of new.xyz cannot be read.", "Structure 3 of new.xyz cannot be read."),
    ],
)
def test_files_of_structures_of_parts_are_named_once(desk, message, named):
    frames = FrameFiles.open("new.xyz")
    with naming_files(frames):
        text = with_files(divided(frames, 2)[1].named(message))
    assert text == named


# --- input that is no file ---


@pytest.mark.parametrize(
    "command",
    [
        "info {}",
        "predict {} new.xyz -o a.csv",
        "predict model.safetensors {} -o a.csv",
        "predict model.safetensors {} -o a.csv --cluster local:1",
        "evaluate model.safetensors {}",
        "evaluate {}.npz --target e",
        "evaluate {}.csv --target e",
        "evaluate {}.json --target e",
        "evaluate {}.parquet --target e",
        "report model.safetensors {}.xyz -o a.html",
        "calibrate {}.npz --target e -o a.json",
        "apply {} members.npz --target e -o a.npz",
        "train {}.xyz --target e -o a.safetensors",
        "train new.xyz --target e --config {} -o a.safetensors",
        "train new.xyz --target e --cluster {}.json -o a.safetensors",
    ],
)
def test_pipes_and_directories_are_no_input(desk, command):
    for suffix in ("", ".npz", ".csv", ".json", ".parquet", ".xyz"):
        os.mkfifo(f"pipe{suffix}")
        Path(f"folder{suffix}").mkdir()
    for name, kind in {"pipe": "pipe", "folder": "directory"}.items():
        signal.alarm(30)  # rather than for ever
        ended = qualms(command.format(name))
        signal.alarm(0)
        assert ended.code == 2
        assert f"a {kind}" in ended.err
        assert not [*desk.glob("a.*")]


# --- signals ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_file(desk, number):
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores one, for all processes below
    try:
        check_signal(desk, number)
    finally:
        signal.signal(number, before)


def check_signal(desk, number):
    text = Path("new.xyz").read_text()
    with Path("large.xyz").open("w") as file:
        file.writelines([text] * 450)
    before = {*os.listdir()}
    command = [*COMMAND, "predict", "model.safetensors", "large.xyz", "-o", "large.csv"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in desk.glob(".large*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert errors.count("\n") == 1
    assert "no incomplete file" in errors
    assert {*os.listdir()} == before
