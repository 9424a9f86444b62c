"""``python -m qualms`` is the command ``qualms``."""

from qualms.cli.app import main

if __name__ == "__main__":
    main()
