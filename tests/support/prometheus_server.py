"""A real Prometheus with the configuration of deploy/monitoring, that scrapes servers of a test."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.child import Child, child_environment
from tests.support.monitoring import FOLDER
from tests.support.ports import reserve_port
from tests.support.waiting import wait_until

PROGRAM: Final = shutil.which("prometheus")


class PrometheusServer:
    """One Prometheus, with its data in ``folder``.

    Args:
        targets: job of the configuration -> addresses to scrape in place of those in the file.
    """

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[str]]) -> None:
        assert PROGRAM is not None
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": list(targets.get(job["job_name"], ()))}]
        folder.mkdir()
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.address = f"127.0.0.1:{reserve_port()}"
        words = [
            PROGRAM, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={self.address}",
        ]  # fmt: skip
        self.child = Child(words, name="prometheus", log=folder / "log", environment=child_environment(GOMAXPROCS="1"))

    def __enter__(self) -> PrometheusServer:
        try:
            wait_until(self._is_ready, lambda: f"Prometheus answers: {self.child.said()}")
        except BaseException:
            self.child.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()

    def _is_ready(self) -> bool:
        assert self.child.running, self.child.said()
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=300) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=300) as answer:
            reply = json.loads(answer.read())
        assert reply["status"] == "success", reply
        return reply["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression now. Raises urllib.error.HTTPError for a wrong one."""
        result: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return result

    def rules(self) -> dict[str, dict[str, Any]]:
        """Return the rules by their names, with ``health``, ``lastError`` and ``state``."""
        return {rule["name"]: rule for group in self._get("rules")["groups"] for rule in group["rules"]}
