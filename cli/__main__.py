"""`python -m specdec_cli` and the script `specdec`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Runs the command line; before there is anything to clean up, Ctrl-C ends it at once.

    On the way out it does nothing, as it would change the exit code of what is already over.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from specdec_cli.main import main as run

    try:
        run()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
