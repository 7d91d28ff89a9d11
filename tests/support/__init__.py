"""Everything that tests import: fakes, processes, worlds with a reference model, traces. Nothing here is collected."""
