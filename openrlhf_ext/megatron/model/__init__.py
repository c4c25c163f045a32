"""The model of one rank: shape, layers, names and splits of its weights, weights in and out."""
