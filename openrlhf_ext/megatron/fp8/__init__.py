"""FP8 in Megatron's decoder: emulated layers, TransformerEngine's, and the state of delayed scaling."""
