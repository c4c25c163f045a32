"""The checks that meet a GPU: `bash tests/gpu/run.sh`; small, they run in the suite too."""
