"""The package ``mooncake`` of a program that was started by ``python -m simm.connectors.mooncake``.

Its module ``store`` is SiMM's. All others are those of an installed Mooncake, as far as there is one.
"""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
