"""One training or scoring step: packing, pipeline, optimizer."""


class NonFiniteUpdateError(FloatingPointError):
    """The loss or the gradient norm of a train step is NaN or infinite, on every rank; the step was
    not applied."""
