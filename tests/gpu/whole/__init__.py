"""The bundle for a whole run on a GPU machine without a network: `bash tests/gpu/bundle.sh FOLDER
--whole`."""
