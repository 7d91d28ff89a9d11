"""Build SiMM; ``setup.cfg`` has all the rest."""

from __future__ import annotations

import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class CleanBuild(build_py):
    """Copies the modules into an empty folder. Otherwise a wheel gets those that a build before has left there."""

    def run(self) -> None:
        if not getattr(self, "editable_mode", False):
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(cmdclass={"build_py": CleanBuild})
