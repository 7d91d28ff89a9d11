"""From settings to a connected client: what all commands of a person share."""

from __future__ import annotations

from typing import Any

from .channel import Refused
from .config import Settings
from .errors import TransportError
from .manager_link import ManagerClient
from .startup import read_tokens


def token_of(settings: Settings) -> str:
    """The credential to show, or an empty string. Raises ConfigError."""
    return next(iter(read_tokens(settings.token_file)), "")


def client_arguments(settings: Settings) -> dict[str, Any]:
    """Keyword arguments of :class:`~simm.client.Client`. Raises ConfigError."""
    return {
        "manager": ",".join(map(str, settings.manager)),
        "namespace": settings.namespace,
        "path": settings.path,
        "deadline_s": settings.deadline_ms / 1000,
        "checksum": settings.checksum,
        "copy_threads": settings.copy_threads,
        "token": token_of(settings),
        "replicas": settings.replicas,
        "rdma_devices": settings.rdma_devices,
    }


def manager_client(settings: Settings) -> ManagerClient:
    """A connected link to the manager.

    An engine's client gives a manager some seconds to come up; whoever types a command is told at once. Raises
    TransportError.
    """
    link = ManagerClient(settings.manager, deadline_s=settings.deadline_ms / 1000, token=token_of(settings))
    try:
        link.connect()
    except Refused:
        raise  # it answers, and says why it will not have us
    except TransportError as exc:
        raise TransportError(f"{exc}, or name it with --manager or SIMM_MANAGER") from exc
    return link
