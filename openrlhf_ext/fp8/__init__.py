"""FP8 linear layers: recipes, the formulas of their scales, and an emulation in plain torch.

Everything here needs torch only. ``recipe`` says what is FP8 and how, ``quantize`` has the formulas, ``emulation`` the
three products of a linear layer, ``tiles`` compares how trainer and rollout engine cut their weights.
"""
