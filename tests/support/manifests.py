"""What the containers of deploy/kubernetes and deploy/helm may do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Capabilities that a comment in the manifests explains.
EXPLAINED: Final[Mapping[str, set[str]]] = {
    "manager": set(),
    "dataserver": {"SYS_NICE"},
    "runtime-folder": {"CHOWN"},
    "simm": set(),
    "events": set(),
    "index": set(),
}


def unexplained(
    pod: Mapping[str, Any], container: Mapping[str, Any], explained: Mapping[str, set[str]] = EXPLAINED
) -> list[str]:
    """Return what a container may do without a need. ``explained``: capabilities by the names of containers."""
    context = container.get("securityContext", {})
    found = []
    if context.get("allowPrivilegeEscalation") is not False:
        found.append("it may gain rights")
    if context.get("readOnlyRootFilesystem") is not True:
        found.append("it may write its root filesystem")
    capabilities = context.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", ())) != explained[container["name"]]:
        found.append("it has capabilities")
    if context.get("privileged"):
        found.append("it is privileged")
    around = pod.get("securityContext", {})
    if (context.get("runAsUser", around.get("runAsUser", 0)) == 0) != (container["name"] == "runtime-folder"):
        found.append("it is root")
    if around.get("seccompProfile") != {"type": "RuntimeDefault"}:
        found.append("it may make all system calls")
    if pod.get("automountServiceAccountToken") is not False:
        found.append("it has a token of Kubernetes")
    return found
