"""An exception that nobody can catch fails the test that it happens in: a thread's, and a finalizer's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BODIES = {
    "thread": "    thread = threading.Thread(target=lambda: 1 // zero)\n    thread.start()\n    thread.join()\n",
    "finalizer": "    class Dies:\n        def __del__(self): 1 // zero\n    made = Dies()\n    del made\n",
    "neither": "    threading.Thread(target=lambda: 1 // 1).start()\n",
}


@pytest.mark.parametrize(("body", "code"), [("thread", 1), ("finalizer", 1), ("neither", 0)])
def test_it_fails(body: str, code: int, tmp_path: Path) -> None:
    """``neither``: the control, a run in which all goes well."""
    test = tmp_path / "test_it.py"
    test.write_text(f"import threading\nzero = 0\n\ndef test():\n{BODIES[body]}", "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "setup.cfg")]
    done = subprocess.run([*command, f"--rootdir={tmp_path}", str(test)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("ZeroDivisionError" in done.stdout) == bool(code)
