"""Resumable checkpoints as files: plain JSON and safetensors, a manifest of checksums, and a folder
that keeps N. Nothing here knows of a model or of a trainer, and nothing that is read can run code:
there is no pickle."""

from openrlhf_ext.checkpoints.files import CheckpointError, FileEntry, check_files, write_file
from openrlhf_ext.checkpoints.store import CheckpointStore, Manifest, check_share, read_manifest
from openrlhf_ext.checkpoints.tensors import (
    Block,
    BlockRange,
    TensorIndex,
    TensorReader,
    write_pieces,
)

__all__ = [
    "Block",
    "CheckpointError",
    "CheckpointStore",
    "FileEntry",
    "Manifest",
    "BlockRange",
    "TensorIndex",
    "TensorReader",
    "check_files",
    "check_share",
    "read_manifest",
    "write_file",
    "write_pieces",
]
