"""Real servers and clients, killed at random: ``python -m tests.system.stress``."""
