"""FP8 on this machine: te.Linear against our emulation, matrix products, and eight layers of a 32B
model.

    bash examples/scripts/fp8_study.sh [--bundle DIR] [--minutes N] [--out DIR] [STUDY.yaml]

``settings`` reads a study, ``cells`` lists what it measures, ``linear``, ``products`` and
``layers`` measure, each cell in a process of its own, ``run`` starts them and keeps the JSON,
``report`` makes Markdown of it.
``published.json`` has what others measured. ``mismatch`` compares the log-probs of trainer and
engine, a program of its own. Needs torch; megatron-core and pydantic for the layers;
TransformerEngine on a GPU.
"""
