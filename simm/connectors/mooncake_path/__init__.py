"""What ``python -m simm.connectors.mooncake`` puts on a command's path: a package ``mooncake``. Not to be imported."""
