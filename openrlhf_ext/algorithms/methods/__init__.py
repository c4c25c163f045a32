"""The methods: one file each, found by being in this folder and known by the file's name.

In their formulas f(w, A) = min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) and w_it = exp(new_it -
old_it). They are per prompt, of G completions with T_i tokens and (penalized) rewards r_i; the mean
over prompts is left out. Equation numbers are those of the paper named.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
