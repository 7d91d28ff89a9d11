"""The one exception that says: an invariant was violated."""


class InvariantViolation(AssertionError):
    """A test saw wrong bytes, or something else that must never happen."""
