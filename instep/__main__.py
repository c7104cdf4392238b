"""``python -m instep``: the command, where its script is not on the path (``torchrun -m instep train``)."""

from __future__ import annotations

import sys

from instep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
