"""A server follows its token file while it runs, and closes connections whose token was removed or changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ..config.startup import TokenFile
from ..config.tokens import Token
from .loop import Loop
from .peer import Service

#: Between two looks at the file, seconds. A change counts when it stands for two looks.
LOOK_S: Final = 1.0


def watch_tokens(
    loop: Loop, tokens: Sequence[Token], service: Service | None = None, changed: Callable[[], None] = lambda: None
) -> None:
    """Follow the file of ``tokens``, if they are of one, for the connections of ``service``.

    The context of each of its peers has a ``gate``. Its new connections read ``tokens`` themselves. ``changed`` is
    called after each change.
    """
    if not isinstance(tokens, TokenFile):
        return

    def look() -> None:
        if not tokens.refresh():
            return
        changed()
        rights = {token.rights for token in tokens}
        for peer in list(loop.peers) if service is not None else ():
            token = peer.context.gate.token if peer.service is service else None
            if token is not None and token.rights not in rights:
                peer.close("its token was removed, or has other rights now")

    loop.call_every(LOOK_S, look)
