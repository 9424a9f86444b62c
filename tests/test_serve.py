"""The page of `qualms serve`: its answers, who may ask, and what hostile uploads can do."""

import asyncio
import bz2
import gzip
import http.client
import io
import itertools
import json
import lzma
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import ase.io
import numpy as np
import psutil
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from atomistic_fixtures import ENERGY, SMOOTH, labelled_dimers, make_model
from scipy.stats import norm
from test_cli import qualms
from test_fuzz import TOKENS, damaged

from qualms import AtomisticModel, Prediction
from qualms.atomistic.evaluation import nearest_environments

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

PATIENCE = 120


class Served:
    """`qualms serve`, run as a user does."""

    def __init__(self, *arguments, folder=None, browser="--no-browser"):
        command = [sys.executable, "-m", "qualms", "serve", *map(str, arguments)]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*command, browser, "--port", "0"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = self.process.stdout.readline().strip()
        if not self.url:  # it has ended
            self.errors, self.code = self.process.stderr.read(), self.process.wait()
            return
        self.port, self.token = urlsplit(self.url).port, self.url.partition("token=")[2]

    def ask(self, path, body=None, *, token=None, method=None, headers=None, **query):
        """Status and content of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        token = self.token if token is None else token
        query = urlencode({"token": token, **query} if token else query)
        method = method or ("GET" if body is None else "POST")
        connection.request(method, f"{quote(path)}?{query}", body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def json(self, path, body=None, **options):
        status, content = self.ask(path, body, **options)
        assert status == 200, content
        return json.loads(content)

    def processes(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self):
        """End it, and with it all of its processes."""
        processes = self.processes()
        self.process.terminate()
        self.process.communicate(timeout=PATIENCE)
        assert psutil.wait_procs(processes, timeout=PATIENCE)[1] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory, molecules, energy_model, shift_model, force_model, alloys):
    """Models of energies, shifts, forces of molecules and of crystals, and structures."""
    folder = tmp_path_factory.mktemp("served")
    energy_model.save(folder / "energy.safetensors")
    shift_model.save(folder / "shift.safetensors")
    force_model.save(folder / "alloys.safetensors")
    dimers = labelled_dimers(34)
    options = {"representation": SMOOTH, "baseline": "mean", "forces": "forces", "n_members": 8}
    make_model("energy", **options).fit(dimers[:30]).save(folder / "dimers.safetensors")
    ase.io.write(folder / "train.xyz", molecules[:120])
    ase.io.write(folder / "energy.xyz", molecules[120:132])
    ase.io.write(folder / "shift.xyz", molecules[60:64])
    ase.io.write(folder / "dimers.xyz", dimers[30:])
    ase.io.write(folder / "alloys.xyz", alloys[26:])
    return folder


NAMES = ("energy", "shift", "dimers", "alloys")


@pytest.fixture(scope="module")
def served(folder):
    models = [folder / f"{name}.safetensors" for name in NAMES]
    served = Served(*models, "--training", folder / "train.xyz")
    yield served
    served.end()


def predict(served, folder, name, **query):
    body = (folder / f"{name}.xyz").read_bytes()
    return served.json("/api/predict", body, model=f"{name}.safetensors", **query)


# --- answers ---


def test_answers_soon_and_describes_its_models(served):
    status, page = served.ask("/")
    assert (status, b"<title>qualms</title>" in page) == (200, True)
    assert b"unsafe" not in page
    document = served.json("/api/model")
    assert [model["name"] for model in document["models"]] == [f"{n}.safetensors" for n in NAMES]
    assert document["models"][2]["forces"]
    assert document["limits"] == {"bytes": 20_000_000, "atoms": 5000, "all_atoms": 50_000}


@pytest.mark.parametrize("name", NAMES)
def test_equals_qualms_predict(served, folder, tmp_path, name):
    document = predict(served, folder, name)
    model = AtomisticModel.load(folder / f"{name}.safetensors")
    has_forces, atomic = model.fitted.settings.has_forces, model.fitted.per_atom
    options = "--forces --stress " * (name == "alloys") or "--forces " * has_forces
    command = f"predict {folder}/{name}.safetensors {folder}/{name}.xyz -o {tmp_path}/out.npz"
    assert qualms(f"{command} {options} {'' if atomic else '--atoms'}").code == 0
    expected, target = np.load(tmp_path / "out.npz"), model.settings.target
    structures = document["structures"]

    def same(key, values):
        """Equal to rounding, far below the printed digits."""
        assert np.allclose(np.array(values, float), expected[key], rtol=1e-9, atol=1e-12), key

    if atomic:
        for key, column in (
            (target, "property"),
            (f"{target}_uncertainty", "property_uncertainty"),
        ):
            values = [v for s in structures for v in s["atoms"][column] if v is not None]
            same(key, values)
    else:
        same(target, [s["value"] for s in structures])
        same(f"{target}_uncertainty", [s["uncertainty"] for s in structures])
        same(f"{target}_atoms", [v for s in structures for v in s["atoms"]["contribution"]])
    for key in ("forces", "forces_uncertainty"):
        if has_forces:
            same(key, [row for s in structures for row in s[key]])
    if name == "alloys":
        same("stress", [s["stress"] for s in structures])
        same("stress_uncertainty", [s["stress_uncertainty"] for s in structures])
    assert [s["extrapolates"] for s in structures] == expected["qualms_extrapolates"].tolist()
    reasons = ["; ".join(s["reasons"]) for s in structures]
    assert reasons == expected["qualms_extrapolation_reason"].tolist()


def test_intervals_and_references(served, folder, energy_model):
    frames = ase.io.read(folder / "energy.xyz", ":")
    prediction = energy_model.predict(frames)
    document = predict(served, folder, "energy")
    for level in (68, 95):
        low, high = prediction.interval(level / 100, "conformal")
        found = [s["intervals"][str(level)] for s in document["structures"]]
        assert np.allclose(found, np.stack([low, high], 1))
    y = [atoms.info[ENERGY] for atoms in frames]
    assert np.allclose([s["reference"] for s in document["structures"]], y)


@pytest.mark.parametrize("suffix", ["xyz", "csv"])
@pytest.mark.parametrize("name", NAMES)
def test_files_are_those_of_qualms_predict(served, folder, tmp_path, name, suffix):
    body = (folder / f"{name}.xyz").read_bytes()
    path = tmp_path / f"served.{suffix}"
    query = {"model": f"{name}.safetensors", "format": suffix}
    path.write_bytes(served.ask("/api/predict", body, **query)[1])
    command = f"predict {folder}/{name}.safetensors {folder}/{name}.xyz -o {tmp_path}/own.{suffix}"
    assert qualms(command).code == 0
    if suffix == "csv":
        rows = [p.read_text().splitlines() for p in (path, tmp_path / "own.csv")]
        assert (rows[0][0], len(rows[0])) == (rows[1][0], len(rows[1]))
        return
    key = "shift" if name == "shift" else ENERGY if name == "energy" else "energy"
    for atoms, own in zip(*(ase.io.iread(p) for p in (path, tmp_path / "own.xyz")), strict=True):
        for key_ in (key, f"{key}_uncertainty"):
            values = [
                a.arrays[key_]
                if name == "shift"
                else (a.info | dict(a.calc.results))[key_]
                if a.calc
                else a.info[key_]
                for a in (atoms, own)
            ]
            assert np.allclose(*values, rtol=1e-9, equal_nan=True)


def test_similar_training_environments(served, folder, molecules, energy_model):
    """The nearest representatives by brute force, and the structures that they come from."""
    body = (folder / "energy.xyz").read_bytes()
    document = served.json("/api/similar", body, structure=3, atom=2)
    fitted = energy_model.fitted
    chunk = next(energy_model.chunks([molecules[123]]))
    K = fitted.representation.kernel(chunk.batch.features[2:3], fitted.representatives)[0]
    best = np.argsort(-K, kind="stable")[:3]
    assert [[s["structure"], s["atom"]] for s in document["similar"]] == fitted.origins[
        best
    ].tolist()
    assert np.allclose([s["similarity"] for s in document["similar"]], K[best], atol=1e-5)
    for similar in document["similar"]:
        atoms = molecules[similar["structure"]]
        assert np.allclose(similar["geometry"]["positions"], atoms.positions, atol=1e-5)
    # A representative is most similar to itself.
    number, atom = fitted.origins[5]
    nearest = nearest_environments(energy_model, [molecules[number]], 1)[0]
    assert (nearest.structure[atom, 0], nearest.atom[atom, 0]) == (number, atom)
    assert nearest.similarity[atom, 0] > 0.9999
    # The data are not those of another model, which says so.
    query = {"model": "alloys.safetensors", "structure": 0, "atom": 0}
    other = served.json("/api/similar", (folder / "alloys.xyz").read_bytes(), **query)
    assert "geometry" not in other["similar"][0]
    assert "not the one" in other["training"]


def test_scores_and_report(served, folder):
    body = (folder / "energy.xyz").read_bytes()
    document = served.json("/api/evaluate", body)
    assert document["quantities"]["energy"]["n_points"] == 12
    ended = qualms(
        f"report {folder}/energy.safetensors {folder}/energy.xyz -o {folder}/r.html --json"
    )
    assert document["quantities"]["energy"]["assessment"] == ended.document["assessment"]
    status, page = served.ask("/api/report", body)
    assert (status, page[:15]) == (200, b"<!DOCTYPE html>")
    status, content = served.ask("/api/evaluate", _xyz(molecule("CH4")))
    assert status == 400
    assert "no" in json.loads(content)["error"]["message"].lower()


def test_progress_and_ranking(served, folder):
    frames = ase.io.read(folder / "energy.xyz", ":2")
    copies = [frames[0].copy() for _ in range(3)]
    for k, atoms in enumerate(copies):
        atoms.positions[0] += 0.02 * k
    body = "".join(_xyz(atoms).decode() for atoms in (*copies, frames[1])).encode()
    accept = {"Accept": "application/x-ndjson"}
    status, content = served.ask("/api/predict", body, headers=accept)
    events = [json.loads(line) for line in content.splitlines()]
    assert status == 200
    assert {"event": "progress", "done": 4, "total": 4} in events
    (group,) = events[-1]["result"]["ranking"]
    values = [s["value"] for s in events[-1]["result"]["structures"]]
    assert group["structures"] == np.argsort(values[:3]).tolist()
    assert sum(group["probability"]) == pytest.approx(1)


def test_what_cannot_be_predicted_says_why(served):
    frames = [molecule("CH4"), Atoms("CCu", [[0, 0, 0], [2, 0, 0]])]
    frames.append(Atoms("C2", [[0, 0, 0], [0, 0, 0.01]]))
    document = served.json("/api/predict", b"".join(map(_xyz, frames)))
    fine, unknown, close = document["structures"]
    assert "value" in fine
    assert "Cu" in unknown["problem"]
    assert "apart" in close["problem"]
    assert not {"value", "atoms"} & {*unknown, *close}


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/api/predict", {"model": "none"}),
        ("/api/predict", {"format": "exe"}),
        ("/api/similar", {}),
        ("/api/similar", {"structure": 0, "atom": 99}),
        ("/api/similar", {"structure": 99, "atom": 0}),
        ("/api/similar", {"structure": -1, "atom": "9" * 5000}),
    ],
)
def test_wrong_requests(served, folder, path, query):
    status, content = served.ask(path, (folder / "energy.xyz").read_bytes(), **query)
    assert status == 400
    assert json.loads(content)["error"]["message"]


# --- who may ask ---


def test_token_and_host(served):
    paths = ["/", "/page.js", "/page.css", "/chemiscope.js", "/api/model", "/api/examples/0", "/x"]
    for path in paths:
        for token in ("", "wrong", served.token[:-1], served.token.swapcase(), "é"):
            assert served.ask(path, token=token)[0] == 403
        for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "8.8.8.8"):
            assert served.ask(path, headers={"Host": host})[0] == 403
    for host in ("evil@127.0.0.1", "[::1:x", "127.0.0.1:x", "localhost:80:80", "[evil]"):
        assert served.ask("/", headers={"Host": host})[0] == 403
    assert served.ask("/api/predict", b"x", token="wrong")[0] == 403
    bearer = {"Authorization": f"Bearer {served.token}"}
    assert served.ask("/api/model", token="", headers=bearer)[0] == 200
    for host in (f"localhost:{served.port}", "LocalHost", "[::1]:80"):
        assert served.ask("/", headers={"Host": host})[0] == 200
    assert served.ask("/api/model", b"", method="PUT")[0] == 405


def test_other_machines_only_on_request(tmp_path):
    """With --host: a warning, addresses and the name of this machine, and no other name."""
    (tmp_path / "report.html").write_text("x")
    served = Served(tmp_path, "--host", "0.0.0.0")
    try:
        name = socket.gethostname()
        assert served.url.startswith(f"http://{name}:{served.port}/?token=")
        for host in (name.upper(), "192.0.2.1", "[2001:db8::1]:80", "localhost"):
            assert served.ask("/", headers={"Host": host})[0] == 200
        for host in ("evil.example", f"{name}.evil.example", f"evil@{name}", "127.1"):
            assert served.ask("/", headers={"Host": host})[0] == 403
    finally:
        served.process.terminate()
        errors = served.process.communicate(timeout=PATIENCE)[1]
    assert "not encrypted" in errors.replace("\n", " ")


def test_listens_to_this_machine_only(served):
    connections = psutil.Process(served.process.pid).net_connections()
    places = {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}
    assert places == {("127.0.0.1", served.port)}
    for process in served.processes():
        assert not [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN]


def test_nothing_is_imported_from_the_working_directory(folder, tmp_path):
    """Neither by the server nor by the processes that predict."""
    marker = tmp_path / "executed"
    for name in ("ase", "numpy", "starlette", "uvicorn", "anyio", "torch"):
        (tmp_path / name).mkdir()
        code = f"open({str(marker)!r}, 'w')\nraise SystemError('this is hostile')\n"
        (tmp_path / name / "__init__.py").write_text(code)
    served = Served(folder / "energy.safetensors", folder=tmp_path)
    try:
        assert served.json("/api/predict", _xyz(molecule("CH4")))["structures"][0]["value"] < 0
    finally:
        served.end()
    assert not marker.exists()


# --- hostile uploads ---


def _xyz(atoms):
    text = io.StringIO()
    ase.io.write(text, atoms, format="extxyz")
    return text.getvalue().encode()


SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"


def hostile(frames):
    """Names and contents of 300 uploads, from bad luck to malice."""
    rng = np.random.default_rng(0)
    whole = b"".join(map(_xyz, frames))
    one = _xyz(frames[0])
    atom = b"C 0 0 0\n"
    zeros = bytes(10**9 // 8)
    fixed = [
        ("a.xyz", b"1000000\n\n" + atom),
        ("a.xyz", b"1000000\n\n" + atom * 50_000),
        ("a.xyz", b"6000\n\n" + b"".join(b"C %d 0 0\n" % (2 * i) for i in range(6000))),
        ("a.xyz", b"9" * 5000 + b"\n\n" + atom),
        ("a.xyz", b"%d\n\n" % 2**63 + atom),
        ("a.xyz", b"-1\n\n" + atom),
        ("a.xyz", b"0\n\n"),
        ("a.xyz", b"1\n\nC 1e300 0 0\n"),
        ("a.xyz", b"2\n\nC 0 0 0\nC 9e4 9e4 9e4\n"),
        ("a.xyz", b"1\n\nC nan inf -inf\n"),
        ("a.xyz", b"1\n\nXx 0 0 0\n"),
        ("a.xyz", b"1\n\nUuo 0 0 0\n"),
        ("a.xyz", b'1\nLattice="1e300 0 0 0 1 0 0 0 1"\nC 0 0 0\n'),
        ("a.xyz", b'1\nLattice="1e-9 0 0 0 1e-9 0 0 0 1e-9" pbc="T T T"\nC 0 0 0\n'),
        ("a.xyz", b'1\nLattice="9e4 0 0 0 9e4 0 0 0 9e4" pbc="T T T"\nC 0 0 0\n'),
        ("a.xyz", b"1\nProperties=species:S:1:pos:R:999999999\nC 0 0 0\n"),
        ("a.xyz", b"1\n%s\nC 0 0 0\n" % SCRIPT.encode()),
        ("a.xyz", b"1\n%s=1 energy=%s\nC 0 0 0\n" % (SCRIPT[:8].encode(), SCRIPT.encode())),
        ("a.xyz", b"1\n" + b"k=1 " * 100_000 + b"\nC 0 0 0\n"),
        ("a.xyz", b"1\n" + b"[" * 100_000 + b"\nC 0 0 0\n"),
        ("a.xyz", b"1\na=_JSON" + b"[" * 100_000 + b"\nC 0 0 0\n"),
        (f"{SCRIPT}.xyz", one),
        (f"../../../{SCRIPT}.xyz", b"x"),
        ("../../../../tmp/evil.xyz", one),
        ("a\0b\n.xyz", one),
        ("x" * 10_000 + ".xyz", one),
        ("", one),
        ("-", b"-"),
        ("a.xyz@:1", one),
        ("a.xyz.gz", gzip.compress(zeros)),
        ("a.xyz.bz2", bz2.compress(zeros)),
        ("a.xyz.xz", lzma.compress(zeros[: 10**8], preset=0)),
        ("a.xyz.gz", gzip.compress(whole, mtime=0)[:-9]),
        ("a.xyz.gz", gzip.compress(gzip.compress(whole, mtime=0))),
        ("a.xyz.gz.gz", gzip.compress(gzip.compress(zeros))),
        ("a.cif.bz2.gz", gzip.compress(bz2.compress(zeros))),
        ("a.xyz", b"0\n\n" * 10**6),
        ("a.xyz.gz", whole),
        ("a.traj", b"- of Ulm" + bytes([255]) * 200),
        ("a.db", b"SQLite format 3\0" + bytes(1000)),
        ("a.json", b'{"1": {"numbers": [6], "positions": [[0,0,0]]}}'),
        ("a.json", b"[" * 200_000),
        ("a.cif", b"data_x\nloop_\n" + b"_cell_length_a\n" * 50_000),
        ("POSCAR", b"x\n1.0\n1 0 0\n0 1 0\n0 0 1\nC\n100000000\nDirect\n0 0 0\n"),
        (
            "vasprun.xml",
            b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "' + b"&a;" * 9999 + b'">]><x>&b;</x>',
        ),
        ("a.py", b"import os\nos.abort()\n"),
        ("a.pkl", b"\x80\x04cos\nabort\n(tR."),
        ("a.npz", b"PK\3\4" + bytes(100)),
        ("a.html", SCRIPT.encode()),
        ("a.xyz", bytes(range(256)) * 100),
        ("a.xyz", b"\n" * 100_000),
        ("a.xyz", "1\n\nС 0 0 0\n".encode()),  # a Cyrillic letter
        ("a.xyz", b"1\r\n\r\nC 0 0 0\r\n" * 3),
    ]
    yield from fixed
    written = {}
    for name, form in (
        ("a.cif", "cif"),
        ("POSCAR", "vasp"),
        ("a.traj", "traj"),
        ("a.json", "json"),
    ):
        text = io.BytesIO() if form in ("traj", "cif") else io.StringIO()
        ase.io.write(text, bulk("Cu"), format=form)
        content = text.getvalue()
        written[name] = content if isinstance(content, bytes) else content.encode()
    written["a.xyz"], written["b.xyz"], written["a.xyz.gz"] = (
        one,
        whole,
        gzip.compress(one, mtime=0),
    )
    names = itertools.cycle(written)
    for _ in range(300 - len(fixed) - len(TOKENS)):
        name = next(names)
        yield name, damaged(written[name], rng)
    for token in TOKENS:
        yield "a.xyz", b"1\nx=1\nC %s 0 0\n" % token.encode()


class Memory(threading.Thread):
    """The most memory that any of the processes has taken."""

    def __init__(self, served):
        super().__init__(daemon=True)
        self.served, self.most, self.stop = served, 0, False

    def run(self):
        while not self.stop:
            with suppress(psutil.NoSuchProcess):
                for process in self.served.processes():
                    self.most = max(self.most, process.memory_info().rss)
            time.sleep(0.05)


def test_hostile_uploads(served, folder):
    """No crash, no traceback, no markup, little memory; and the next request is served."""
    frames = ase.io.read(folder / "energy.xyz", ":3")
    memory = Memory(served)
    memory.start()
    n = predicted = 0
    for name, content in hostile(frames):
        status, answer = served.ask("/api/predict", content, name=name)
        assert status in (200, 400, 413, 503), (name, content[:100], answer)
        text = answer.decode()
        assert "Traceback" not in text
        assert str(Path(tempfile.gettempdir())) not in text
        document = json.loads(answer, parse_constant=lambda x: pytest.fail(x))
        assert status == 200 or document["error"]["message"]
        n, predicted = n + 1, predicted + (status == 200)
    memory.stop = True
    assert n == 300
    assert 20 < predicted < 200
    assert memory.most < 1.5e9
    assert served.json("/api/predict", _xyz(frames[0]))["structures"][0]["value"] < 0


def test_large_uploads_are_refused_early(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as connection:
        head = f"POST /api/predict?token={served.token} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        connection.sendall(f"{head}Content-Length: 1000000000000\r\n\r\n".encode())
        answer = b""
        for _ in range(400):
            try:
                connection.sendall(b" " * 100_000)
            except OSError:
                break
            connection.settimeout(0.001)
            try:
                answer += connection.recv(1000)
                break
            except TimeoutError:
                connection.settimeout(PATIENCE)
        assert b" 413 " in answer
    assert served.ask("/")[0] == 200


# --- several at once ---


def test_a_long_prediction_blocks_no_other_and_can_be_cancelled(served, folder):
    rng = np.random.default_rng(0)
    many = []
    for _ in range(9):  # 49,000 atoms
        atoms = bulk("Cu", cubic=True) * (11, 11, 11)
        atoms.positions += rng.normal(scale=0.05, size=atoms.positions.shape)
        many.append(_xyz(atoms[:4900]))
    model = "alloys.safetensors"
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE)
    query = urlencode({"token": served.token, "model": model})
    body, accept = b"".join(many), {"Accept": "application/x-ndjson"}
    connection.request("POST", f"/api/predict?{query}", body, accept)
    answer = connection.getresponse()
    assert json.loads(answer.readline())["event"] in ("progress", "waiting")
    started = time.monotonic()
    predict(served, folder, "energy")
    short = time.monotonic() - started
    before = {process.pid for process in served.processes()}
    answer.close()
    connection.close()
    # The process that predicted is killed, and another takes its place.
    until = time.monotonic() + PATIENCE
    while not before - {process.pid for process in served.processes()}:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert short < 30  # 3 s on a machine with nothing else to do
    assert predict(served, folder, "dimers")["structures"]


def test_reading_takes_limited_time(folder, tmp_path, monkeypatch):
    """A process that reads for too long is killed; another answers the next request."""
    from qualms.serve import app

    async def ask(pool, content):
        task = {"task": "predict", "format": "json", "name": "a.xyz", "model": "energy"}
        return [event async for event in pool.run(task, content)]

    async def ask_twice():
        pool = app.Pool(app.Files(models={"energy": folder / "energy.safetensors"}), tmp_path)
        pool.fill()
        await pool.ready()
        monkeypatch.setattr(app, "READING_TIME", 0.4)
        try:
            with pytest.raises(app.WorkerError) as error:
                await ask(pool, b"1\nkey=value\nC 0 0 0\n" * 50_001)
            monkeypatch.setattr(app, "READING_TIME", PATIENCE)
            return error.value.kind, (await ask(pool, _xyz(molecule("CH4"))))[-1][0]
        finally:
            await pool.close()

    kind, event = asyncio.run(ask_twice())
    assert (kind, event["event"]) == ("limit", "result")
    assert [*tmp_path.iterdir()] == []


def test_workers_that_have_ended_are_replaced(served, folder):
    """The system may end a process that waits, for want of memory."""
    predict(served, folder, "energy")
    for process in served.processes():
        process.kill()
    time.sleep(1)
    assert predict(served, folder, "energy")["structures"]


def test_a_worker_that_ends_while_it_predicts(served, folder):
    frames = ase.io.read(folder / "energy.xyz", ":") * 100
    query = urlencode({"token": served.token})
    body, accept = b"".join(map(_xyz, frames)), {"Accept": "application/x-ndjson"}
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE)
    connection.request("POST", f"/api/predict?{query}", body, accept)
    answer = connection.getresponse()
    while json.loads(answer.readline())["event"] != "progress":
        pass
    for process in served.processes():
        process.kill()
    last = json.loads(answer.read().splitlines()[-1])
    connection.close()
    assert last["event"] == "error"
    assert "has ended" in last["message"]
    assert predict(served, folder, "energy")["structures"]


# --- reports, errors, and the library ---


def test_reports(folder, tmp_path, no_figures):
    reports = tmp_path / "reports"
    reports.mkdir()
    command = f"report {folder}/energy.safetensors {folder}/energy.xyz -o {reports}/own report.html"
    assert qualms(command.replace("own report", "own_report")).code == 0
    (reports / "secret.txt").write_text("x")
    served = Served(reports)
    try:
        page = served.ask("/")[1].decode()
        ((path, token),) = re.findall(r'href="(reports/[^?]+)\?token=(\w+)"', page)
        status, content = served.ask(f"/{path}", token=token)
        assert (status, content) == (200, (reports / "own_report.html").read_bytes())
        # The token of a report, which its scripts know, is good for nothing else.
        assert served.ask("/", token=token)[0] == 403
        assert served.ask("/reports/secret.txt", token=token)[0] == 403
        assert served.ask("/reports/secret.txt")[0] == 404
        assert served.ask("/reports/..%2fsecret.txt")[0] == 404
        assert served.ask("/api/predict", b"x")[0] == 400
    finally:
        served.end()


def test_reports_of_the_same_name(tmp_path):
    folders = [tmp_path / name for name in ("a", "b & c")]
    for folder in folders:
        folder.mkdir()
        (folder / "report.html").write_text(f"<p>{folder.name}</p>")
    served = Served(*folders)
    try:
        page = served.ask("/")[1].decode()
        links = re.findall(r'href="(reports/[^?]+)\?token=(\w+)"', page)
        answers = [served.ask(f"/{path}", token=token) for path, token in links]
        assert answers == [(200, b"<p>a</p>"), (200, b"<p>b & c</p>")]
        assert served.ask(f"/{links[0][0]}", token=links[1][1])[0] == 403
        (folders[0] / "report.html").unlink()
        assert served.ask(f"/{links[0][0]}")[0] == 404
    finally:
        served.end()


def test_report_on_predictions(folder):
    rng = np.random.default_rng(0)
    frames = ase.io.read(folder / "energy.xyz", ":")
    for atoms in frames * 2:
        std = rng.uniform(0.1, 0.2)
        atoms.info["e"] = atoms.info[ENERGY] + std * rng.normal()
        atoms.info["e_uncertainty"] = std
    ase.io.write(folder / "predicted.xyz", frames)
    served = Served(folder / "predicted.xyz", "--target", "e", "--reference", ENERGY)
    try:
        page = served.ask("/")[1].decode()
        ((path, token),) = re.findall(r'href="(reports/[^?]+)\?token=(\w+)"', page)
        status, content = served.ask(f"/{path}", token=token)
        assert status == 200
        assert b"12 predictions" in content
    finally:
        served.end()


@pytest.mark.parametrize(
    "arguments",
    [
        "none.safetensors",
        "energy.xyz",
        "energy.safetensors energy.xyz",
        ". --training train.xyz",
        ".",
        "energy.xyz --target energy --weights x",
    ],
)
def test_bad_input(folder, monkeypatch, arguments, tmp_path):
    monkeypatch.chdir(folder if "energy" in arguments else tmp_path)
    ended = qualms(f"serve {arguments} --no-browser")
    assert ended.code == 2, ended.err
    assert ended.err.startswith("Error: ")
    assert ended.err.count("\n") == 1


def test_a_browser_of_the_terminal_does_not_stop_the_server(tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text("x")
    script, seen = tmp_path / "browser.py", tmp_path / "seen"
    script.write_text(
        "import sys, time, urllib.request\n"
        "page = urllib.request.urlopen(sys.argv[1], timeout=20).read()\n"
        f"open({str(seen)!r}, 'wb').write(page)\n"
        "time.sleep(5)\n"
    )
    monkeypatch.setenv("BROWSER", f"{sys.executable} {script} %s")
    served = Served(tmp_path, browser="--browser")
    try:
        until = time.monotonic() + 20
        while not (seen.exists() and b"report.html" in seen.read_bytes()):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert served.ask("/")[0] == 200
    finally:
        served.end()


def test_a_damaged_model_ends_the_command(folder, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((folder / "energy.safetensors").read_bytes()[:-100])
    served = Served(path)
    errors = served.process.communicate(timeout=PATIENCE)[1]
    assert served.process.returncode == 2
    assert "Error: " in errors
    assert "Traceback" not in errors


def test_probability_of_being_the_lowest():
    """Two Gaussian points by their difference; equal points share; correlation matters."""
    rng = np.random.default_rng(0)
    common, own = rng.normal(size=64), rng.normal(size=(2, 64))
    for width in (0.1, 3.0):
        prediction = Prediction(np.array([[0.0], [0.3]]) + common + width * own)
        difference = prediction[1] - prediction[0]
        expected = norm.cdf(difference.mean / difference.std)
        assert prediction.lowest()[0] == pytest.approx(expected, abs=0.015)
    assert np.array_equal(prediction.lowest(), prediction.lowest())
    assert prediction.lowest().sum() == pytest.approx(1)
    with pytest.raises(ValueError, match="shape"):
        Prediction(rng.normal(size=(3, 2, 8))).lowest()
