"""Commands for people: doctor, demo, status, topo, simulate and the benchmark, as :mod:`simm.cli` offers them."""
