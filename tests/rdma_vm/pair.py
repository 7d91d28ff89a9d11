"""Run ``python -m tests.rdma_vm.pair PYTEST-ARGUMENTS``: on the first of two cabled machines the tests, on the other
what they ask for.

The other one runs ``remote`` until the first is done with it, and ends with status 0: what pytest says counts.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.rdma_vm import remote


def main() -> int:
    """Both machines run this."""
    if os.environ["SIMM_TEST_VM"] != "0":
        return remote.serve()
    try:
        with remote.connected():
            return subprocess.run([sys.executable, "-m", "pytest", *sys.argv[1:]]).returncode
    except OSError as error:
        print(f"the other machine does not answer: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
