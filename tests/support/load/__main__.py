"""A load process: ``python -m tests.support.load '{"manager": ..., "number": 0, ...}'``; see ``process``."""

from __future__ import annotations

import sys

from .process import main

sys.exit(main(sys.argv[1]))
