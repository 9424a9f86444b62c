"""The command ``qualms``, also as ``python -m qualms``."""

import os
import sys


def run() -> None:
    """Run the command, whose processes import nothing from the working directory.

    They would start with it as the first place to look for modules, so that a folder called joblib
    beside a model would be executed.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    from qualms.cli.app import main

    main()


if __name__ == "__main__":
    # ``python -m`` puts the working directory first as well; the command does not.
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not sys.flags.safe_path and sys.path[0] != package:
        del sys.path[0]
    run()
