"""The local page of ``qualms serve``: models, predictions and reports in a browser.

`app` answers requests, and has nothing to do with structures: `worker` is a process that reads
uploads and calls the library, and may be killed at any time.
"""

#: Limits of an upload: bytes, also after decompression, and atoms of a structure and of all.
LIMITS = {"bytes": 20_000_000, "atoms": 5000, "all_atoms": 50_000}
#: Processes that predict at the same time; others wait.
MAX_WORKERS = 3
#: Hosts that other machines cannot reach.
LOCAL = ("127.0.0.1", "localhost", "::1")
