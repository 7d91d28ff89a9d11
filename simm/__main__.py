"""``python -m simm`` is the ``simm`` command."""

from __future__ import annotations

import os
import sys

# ``python -m`` puts the current folder before all others on the search path. Others may be able to write it, and a
# numpy.py in it must not run. It stays at the end, as SiMM itself may lie there.
if sys.path[:1] == [os.getcwd()]:
    sys.path.append(sys.path.pop(0))

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
