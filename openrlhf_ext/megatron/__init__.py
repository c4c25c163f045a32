"""The policy on Megatron-core: layout, model, weights, packing of micro-batches, forward and train
step."""
