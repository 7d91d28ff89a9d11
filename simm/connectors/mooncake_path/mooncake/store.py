"""``mooncake.store``, served by SiMM: see ``simm/connectors/mooncake.py``."""

from simm.connectors.mooncake import *  # noqa: F403
from simm.connectors.mooncake import __all__ as __all__
