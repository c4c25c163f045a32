"""OpenRLHF's workflow on Megatron-core, with the entropy- and conflict-aware policy-gradient
family.

Importing this package imports nothing heavy; each subpackage imports what it needs.
"""

__version__ = "0.1.0"
