"""One training or scoring step: packing, pipeline, optimizer."""
