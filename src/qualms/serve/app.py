"""The server of ``qualms serve``: routes, who may ask, and the processes that answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import qualms
from qualms.errors import InputError
from qualms.serve import LIMITS, LOCAL, MAX_WORKERS

#: Seconds after which a worker is killed: that reads, and that predicts.
READING_TIME, TIME = 30, 3600
#: Seconds between signs of life of a long prediction.
_HEARTBEAT = 0.5
#: Nothing from elsewhere, and no script or event handler within the page. The viewer has styles.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_STATUS = {"input": 400, "limit": 503, "defect": 500}
_TYPES = {"xyz": "chemical/x-xyz", "csv": "text/csv", "html": "text/html"}


class WorkerError(Exception):
    """A task has failed.

    Parameters
    ----------
    message : str
    kind : {"input", "limit", "defect"}
    """

    def __init__(self, message: str, kind: str = "input") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Files:
    """What is served: models with the options to load them, and pages of reports by name."""

    models: Mapping[str, Path] = field(default_factory=dict)
    training: tuple[Path, ...] = ()
    threads: int | None = None
    baseline: Any = None
    weights: Path | None = None
    reports: Mapping[str, str | Path] = field(default_factory=dict)


class Worker:
    """A process of `qualms.serve.worker`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last = b""  # digest of the upload that it knows
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self, files: Files) -> list[dict[str, Any]]:
        """Start the process, and return descriptions of the models when it has loaded them."""
        self.folder.mkdir()
        # -P: nothing is imported from the working directory.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "qualms.serve.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        options = {
            "models": [str(path) for path in files.models.values()],
            "names": [*files.models],
            "training": [str(path) for path in files.training],
            "folder": str(self.folder),
            "threads": files.threads,
            "baseline": files.baseline,
            "weights": None if files.weights is None else str(files.weights),
        }
        document: list[dict[str, Any]] = []
        async for event, content in self.run(options, b""):
            if event["event"] == "result":
                document = json.loads(content)
        return document

    async def run(self, task: dict[str, Any], content: bytes) -> AsyncGenerator[tuple[Any, bytes]]:
        """Yield the events of a task, and "waiting" where there are none for a while."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        stdin.write(json.dumps(task | {"size": len(content)}).encode() + b"\n" + content)
        started, has_read = time.monotonic(), False
        waiting: asyncio.Task[bytes] | None = None
        try:
            while True:
                waiting = waiting or asyncio.create_task(stdout.readline())
                if not (await asyncio.wait([waiting], timeout=_HEARTBEAT))[0]:
                    seconds = time.monotonic() - started
                    if seconds > (TIME if has_read or not content else READING_TIME):
                        raise WorkerError(f"It took more than {seconds:.0f} s.", "limit")
                    yield {"event": "waiting", "seconds": round(seconds, 1)}, b""
                    continue
                try:
                    line, waiting = waiting.result(), None
                    event = json.loads(line)
                    body = await stdout.readexactly(event.pop("size"))
                except (ValueError, asyncio.IncompleteReadError) as error:
                    message = "The process that read or predicted it has ended: it needs too much"
                    message += " memory, or the file is damaged."
                    raise WorkerError(message, "limit") from error
                has_read = True
                if event["event"] == "error":
                    raise WorkerError(event["message"], event["kind"])
                yield event, body
                if event["event"] == "result":
                    return
        finally:
            if waiting is not None:
                waiting.cancel()

    async def kill(self) -> None:
        """End the process and remove its files."""
        if self._process is not None:
            # Its own method would take the exit status from asyncio, which then complains.
            if self.is_running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Pool:
    """Workers: one for each task that runs, and a spare one."""

    def __init__(self, files: Files, folder: Path) -> None:
        self.files, self._folder = files, folder
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._free = asyncio.Condition()
        self._starting = self._failed = 0
        self._number = 0
        self.models: list[dict[str, Any]] | None = None
        self.error: WorkerError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def fill(self) -> None:
        """Start a worker in the background, unless one is idle or there are enough."""
        if self._idle or self._starting or len(self._all) >= MAX_WORKERS:
            return
        self._starting += 1
        self._do(self._start())

    async def _start(self) -> None:
        self._number += 1
        worker = Worker(self._folder / str(self._number))
        self._all.add(worker)
        try:
            self.models = await worker.start(self.files)
            if worker in self._all:
                self._idle.append(worker)
            else:  # closed in the meantime
                await worker.kill()
            self._failed = 0
        except (WorkerError, OSError) as error:
            self._failed += 1
            # The system may have ended one that could load the models.
            if self.models is None or self._failed > 1:
                self.error = WorkerError(str(error), "limit")
            self._end(worker)
        finally:
            self._starting -= 1
        await self._notify()
        if self._failed == 1 and self.models is not None:
            self.fill()

    def _end(self, worker: Worker) -> None:
        self._all.discard(worker)
        self._do(worker.kill())

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def ready(self) -> list[dict[str, Any]]:
        """Return the descriptions of the models, as soon as they are loaded."""
        async with self._free:
            await self._free.wait_for(lambda: self.models is not None or self.error is not None)
        if self.models is None:
            assert self.error is not None
            raise self.error
        return self.models

    async def run(self, task: dict[str, Any], content: bytes) -> AsyncGenerator[tuple[Any, bytes]]:
        """Yield the events of a task; a worker whose task ends otherwise is killed."""
        await self.ready()
        digest = hashlib.sha256(task["name"].encode() + b"\0" + content).digest()
        started, self.error = time.monotonic(), None  # that of a worker which has ended since
        while (worker := await self._take(digest)) is None:
            yield {"event": "waiting", "seconds": round(time.monotonic() - started, 1)}, b""
        self.fill()  # so that the next need not wait
        is_alive, worker.last = False, digest
        try:
            async with contextlib.aclosing(worker.run(task, content)) as events:
                async for event, body in events:
                    is_alive = event["event"] == "result"
                    yield event, body
        except WorkerError as error:
            is_alive = error.kind == "input"
            raise
        finally:
            if is_alive:
                self._idle.append(worker)
            else:
                self._end(worker)
                self.fill()
            self._do(self._notify())

    async def _take(self, digest: bytes) -> Worker | None:
        """Return an idle worker, or None if all are busy for a while."""
        for worker in [*self._idle]:
            if not worker.is_running:  # the system has ended it
                self._idle.remove(worker)
                self._end(worker)
        self.fill()
        async with self._free:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT):
                    await self._free.wait_for(lambda: self._idle or self.error)
            if self._idle:
                # One that knows the file need not read it again.
                worker = max(self._idle, key=lambda w: w.last == digest)
                self._idle.remove(worker)
                return worker
            if self.error is not None:  # none could be started
                error, self.error = self.error, None
                raise WorkerError(str(error), "limit")
        return None

    async def _notify(self) -> None:
        async with self._free:
            self._free.notify_all()

    async def close(self) -> None:
        """Kill all workers, also those that just start."""
        while self._all or self._tasks:
            for worker in [*self._all]:
                self._end(worker)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=0.1)


# --- who may ask ---


class Guard:
    """Answers 403 without the token, or to a name of the host that others may have defined.

    A page elsewhere can direct a name of its own to this machine (DNS rebinding), but not an
    address.
    """

    def __init__(self, app: ASGIApp, token: str, host: str) -> None:
        self._app, self._token = app, token
        self._is_local = host in LOCAL
        names = ["localhost"] if self._is_local else ["localhost", host, socket.gethostname()]
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if problem := self._problem(request):
            response = JSONResponse({"error": {"message": problem}}, 403, headers=_HEADERS)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, request: Request) -> str:
        if not self._is_known(request.headers.get("host", "")):
            return "This name of the host is not known: use the address that qualms has printed."
        given = request.query_params.get("token") or ""
        given = given or request.headers.get("authorization", "").removeprefix("Bearer ")
        path, tokens = request.scope["path"], [self._token]
        if path.startswith("/reports/"):
            tokens.append(report_token(self._token, path.removeprefix("/reports/")))
        if not any(secrets.compare_digest(given.encode(), t.encode()) for t in tokens):
            return "The token is missing or wrong: use the address that qualms has printed."
        return ""

    def _is_known(self, host: str) -> bool:
        name = re.sub(r":\d+$", "", host.lower()).removeprefix("[").removesuffix("]")
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or not self._is_local


def report_token(token: str, number: str) -> str:
    """Return a token for one report: its scripts can read it, and use it for nothing else."""
    return hmac.new(token.encode(), number.encode(), "sha256").hexdigest()


# --- answers ---


class Server:
    """The routes of an application: see `docs/serve.md`."""

    def __init__(self, files: Files, token: str, folder: Path) -> None:
        self.files, self._token = files, token
        self.pool = Pool(files, folder)

    def routes(self) -> list[Route]:
        """Return the routes."""
        get = {
            "/": self.page,
            "/page.js": self.script,
            "/page.css": self.style,
            "/chemiscope.js": self.viewer,
            "/reports/{number:int}": self.report_file,
            "/api/model": self.model,
            "/api/examples/{number:int}": self.example,
        }
        post = {f"/api/{name}": self.task for name in ("predict", "similar", "evaluate", "report")}
        return [
            *(Route(path, answer, methods=["GET"]) for path, answer in get.items()),
            *(Route(path, answer, methods=["POST"]) for path, answer in post.items()),
        ]

    async def page(self, request: Request) -> Response:
        """Return the page."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            undefined=StrictUndefined,
        )
        reports = [
            {"name": name, "number": k, "token": report_token(self._token, str(k))}
            for k, name in enumerate(self.files.reports)
        ]
        text = environment.get_template("page.html.j2").render(
            token=self._token,
            version=qualms.__version__,
            has_models=bool(self.files.models),
            reports=reports,
        )
        return _answer(text, "text/html")

    async def script(self, request: Request) -> Response:
        """Return the script of the page."""
        return _answer(_own_file("page.js"), "text/javascript")

    async def style(self, request: Request) -> Response:
        """Return the style of the page."""
        base = Path(__file__).parents[1] / "report/report.css"
        return _answer(base.read_text(encoding="utf-8") + _own_file("page.css"), "text/css")

    async def viewer(self, request: Request) -> Response:
        """Return the viewer of structures, if chemiscope is installed."""
        script = await asyncio.to_thread(_viewer_script)
        return _answer(script, "text/javascript") if script else _failed("not installed", 404)

    async def report_file(self, request: Request) -> Response:
        """Return one of the reports, which has a policy of its own, and no access to the rest."""
        from qualms.report.report import POLICY

        number, reports = request.path_params["number"], [*self.files.reports.values()]
        try:
            report = reports[number]
            content = report if isinstance(report, str) else report.read_bytes()
        except (IndexError, OSError):
            return _failed(f"There is no report {number}.", 404)
        return _answer(content, "text/html", f"sandbox allow-scripts allow-downloads; {POLICY}")

    async def model(self, request: Request) -> Response:
        """Return the models, and the limits of uploads."""
        try:
            models = await self.pool.ready() if self.files.models else []
        except WorkerError as error:
            return _failed(str(error), 500)
        return JSONResponse({"models": models, "limits": LIMITS}, headers=_headers())

    async def example(self, request: Request) -> Response:
        """Return a molecule of QM9 as extended XYZ."""
        text = await asyncio.to_thread(_example, request.path_params["number"])
        return _answer(text, "text/plain") if text else _failed("There is no such example.", 404)

    async def task(self, request: Request) -> Response:
        """Run a task on the body of a request: `predict`, `similar`, `evaluate` or `report`."""
        try:
            task = self._task(request)
            content = await _body(request)
        except WorkerError as error:
            return _failed(str(error), 413 if error.kind == "limit" else 400)
        if "application/x-ndjson" in request.headers.get("accept", ""):
            lines = self._lines(task, content)
            return StreamingResponse(lines, media_type="application/x-ndjson", headers=_headers())
        try:
            async with contextlib.aclosing(self.pool.run(task, content)) as events:
                async for event, body in events:
                    if event["event"] == "result":
                        return self._result(task, body)
                    if event["event"] == "waiting" and await request.is_disconnected():
                        break
        except WorkerError as error:
            return _failed(str(error), _STATUS[error.kind])
        return Response(status_code=499)

    def _task(self, request: Request) -> dict[str, Any]:
        """Return the task of a request, or say what is wrong with it."""
        name, query = request.url.path.rpartition("/")[2], request.query_params
        if not self.files.models:
            raise WorkerError("There is no model: name one after `qualms serve`.")
        model = query.get("model", next(iter(self.files.models)))
        if model not in self.files.models:
            names = ", ".join(self.files.models)
            raise WorkerError(f"There is no model {model!r}; there are {names}.")
        task: dict[str, Any] = {"task": name, "model": model}
        task["name"] = query.get("name", "structures.xyz")[:200]
        if name == "predict":
            task["format"] = query.get("format", "json")
            if task["format"] not in ("json", "xyz", "csv"):
                raise WorkerError("The format is json, xyz or csv.")
        if name == "similar":
            for key in ("structure", "atom"):
                text = query.get(key, "")
                if not text.isdecimal() or len(text) > 9:
                    raise WorkerError(f"The number of the {key} is missing: ?{key}=0.")
                task[key] = int(text)
        return task

    async def _lines(self, task: dict[str, Any], content: bytes) -> AsyncIterator[bytes]:
        """Yield the events of a task as lines of JSON; the result of a report is its text."""
        try:
            async with contextlib.aclosing(self.pool.run(task, content)) as events:
                async for event, body in events:
                    line = json.dumps(event)
                    if event["event"] == "result":
                        result = body.decode()
                        is_json = task.get("format", "json") == "json" and task["task"] != "report"
                        result = result if is_json else json.dumps(result)
                        line = f'{{"event":"result","result":{result}}}'
                    yield line.encode() + b"\n"
        except WorkerError as error:
            yield json.dumps({"event": "error", "message": str(error)}).encode() + b"\n"

    def _result(self, task: dict[str, Any], body: bytes) -> Response:
        suffix = "html" if task["task"] == "report" else task.get("format", "json")
        kind = _TYPES.get(suffix, "application/json")
        response = _answer(body, kind)
        if suffix != "json":
            response.headers["Content-Disposition"] = f'attachment; filename="qualms.{suffix}"'
        return response


async def _body(request: Request) -> bytes:
    """Return the body of a request within the limit."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > LIMITS["bytes"]:
            size = f"{LIMITS['bytes'] / 1e6:g} MB"
            raise WorkerError(f"The file is larger than {size}, the limit.", "limit")
    if not content:
        raise WorkerError("The file is empty.")
    return bytes(content)


def _answer(content: str | bytes, media_type: str, policy: str = _POLICY) -> Response:
    return Response(content, media_type=media_type, headers=_headers(policy))


def _failed(message: str, status: int) -> Response:
    document = {"error": {"message": " ".join(message.replace("`", "").split())}}
    return JSONResponse(document, status, headers=_headers())


def _headers(policy: str = _POLICY) -> dict[str, str]:
    return _HEADERS | {"Content-Security-Policy": policy}


@cache
def _own_file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@cache
def _viewer_script() -> str:
    from qualms.report.structure_map import load_viewer

    viewer = load_viewer()
    return "" if viewer is None else viewer.script


@cache
def _example(number: int) -> str:
    """Return one of the first molecules of QM9 that come with the package, with its energies."""
    from qualms.data import qm9
    from qualms.io.xyz import xyz_text

    return xyz_text(qm9(n=number + 1)[number]) if number < 100 else ""


# --- running ---


def application(files: Files, token: str, host: str, folder: Path) -> tuple[ASGIApp, Server]:
    """Return the application, and its server.

    Parameters
    ----------
    files : Files
    token : str
        Which requests must have.
    host : str
        Name or address that is served.
    folder : path
        Directory for the files of workers, which is empty.
    """
    server = Server(files, token, folder)
    return Guard(Starlette(routes=server.routes()), token, host), server


def open_socket(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens: to port 8000, or any free one, unless a port is given."""
    ports = [8000, 0] if port is None else [port]
    for number in ports:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
            listening = socket.socket(family, socket.SOCK_STREAM)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError as error:
            reason = f"{host}:{number} cannot be served ({error.strerror})."
            continue
        return listening
    raise InputError(f"{reason} Use another `port` or `host`.", parameter="port")


def serve(
    files: Files,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    announce: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve a page until the process is interrupted.

    Parameters
    ----------
    files : Files
    host : str
        Address or name to bind.
    port : int, optional
        8000 by default, or any free one if that is in use.
    announce : callable
        Is called with the address of the page when it is served.
    """
    with open_socket(host, port) as listening, tempfile.TemporaryDirectory() as folder:
        asyncio.run(_run(files, listening, host, Path(folder), announce))


async def _run(
    files: Files,
    listening: socket.socket,
    host: str,
    folder: Path,
    announce: Callable[[str], None],
) -> None:
    import uvicorn

    token = secrets.token_urlsafe(24)
    app, server = application(files, token, host, folder)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    served = uvicorn.Server(config)
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    name = f"[{name}]" if ":" in name else name
    url = f"http://{name}:{listening.getsockname()[1]}/?token={token}"
    error: WorkerError | None = None

    async def begin() -> None:
        nonlocal error
        while not served.started:
            await asyncio.sleep(0.01)
        announce(url)
        if files.models:
            server.pool.fill()
            try:
                await server.pool.ready()
            except WorkerError as problem:
                error, served.should_exit = problem, True

    beginning = asyncio.create_task(begin())
    try:
        await served.serve(sockets=[listening])
    finally:
        beginning.cancel()
        await server.pool.close()
    if error is not None:
        raise InputError(str(error), parameter="model")
